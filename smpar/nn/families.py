"""Families of models whose division is known: those of transformers, and what users add.

A class is known by its name, so that nothing here imports transformers. A model whose configuration has a
``base_model_tp_plan`` is served from that, with no entry here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smpar.nn.family import Family, divide, matching
from smpar.nn.group import TensorGroup
from smpar.nn.module import become
from smpar.nn.twins import Outermost, Places
from smpar.nn.vocabulary import divide_embedding

_BERT = Family(
    {
        "encoder.layer.*.*.self.query": "colwise",
        "encoder.layer.*.*.self.key": "colwise",
        "encoder.layer.*.*.self.value": "colwise",
        "encoder.layer.*.*.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
)
_BART = Family(
    {
        "layers.*.*.q_proj": "colwise",
        "layers.*.*.k_proj": "colwise",
        "layers.*.*.v_proj": "colwise",
        "layers.*.*.out_proj": "rowwise",
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
    }
)
_families: dict[str, Family] = {
    "GPT2Model": Family(
        {
            "h.*.attn.c_attn": "colwise*3",
            "h.*.attn.c_proj": "rowwise",
            "h.*.crossattention.c_attn": "colwise*2",
            "h.*.crossattention.q_attn": "colwise",
            "h.*.crossattention.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        counts=("split_size",),
    ),
    "BertModel": _BERT,
    "RobertaModel": _BERT,
    "BartEncoder": _BART,
    "BartDecoder": _BART,
    "T5Stack": Family(
        {
            "block.*.layer.*.*.q": "colwise",
            "block.*.layer.*.*.k": "colwise",
            "block.*.layer.*.*.v": "colwise",
            "block.*.layer.*.*.relative_attention_bias": "colwise",
            "block.*.layer.*.*.o": "rowwise",
            "block.*.layer.*.*.wi": "colwise",
            "block.*.layer.*.*.wi_0": "colwise",
            "block.*.layer.*.*.wi_1": "colwise",
            "block.*.layer.*.*.wo": "rowwise",
        },
        counts=("n_heads",),
    ),
    "ViTModel": Family(
        {
            "layers.*.attention.q_proj": "colwise",
            "layers.*.attention.k_proj": "colwise",
            "layers.*.attention.v_proj": "colwise",
            "layers.*.attention.o_proj": "rowwise",
            "layers.*.mlp.fc1": "colwise",
            "layers.*.mlp.fc2": "rowwise",
        }
    ),
}


def register_family(cls: type[nn.Module] | str, family: Family) -> None:
    """Say how models of a class, and of its subclasses, are divided.

    Args:
        cls: the class, or its name.
    """
    _families[cls if isinstance(cls, str) else cls.__name__] = family


def family_of(module: nn.Module) -> Family | None:
    """How a model is divided; None if that is not known."""
    for cls in type(module).__mro__:
        if (family := _families.get(cls.__name__)) is not None:
            return family
    plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not isinstance(plan, Mapping):
        return None
    family = Family(_completed(plan))
    found = matching(family.plan, [name for name, _ in module.named_modules()])
    return family if any(style.startswith("colwise") for _, style in found) else None


def _completed(plan: Mapping[str, str]) -> dict[str, str]:
    """A plan of transformers, and what follows from it.

    A linear of gate and up is divided in two blocks, where transformers divides it evenly and gathers what it gives;
    and an expert for all tokens, beside experts that are divided, is divided, too.
    """
    done = dict(plan)
    for name, style in plan.items():
        if name.endswith(".gate_up_proj") and style == "colwise_gather_output":
            done |= {name: "packed_colwise", name.removesuffix("gate_up_proj") + "down_proj": "rowwise"}
        elif style == "moe_tp_experts":
            shared = name.rpartition(".")[0] + ".shared_expert."
            done |= {shared + "gate_proj": "colwise", shared + "up_proj": "colwise", shared + "down_proj": "rowwise"}
    return done


def divide_model(module: nn.Module, group: TensorGroup, vocabulary: bool = True) -> nn.Module:
    """Make a model whose family is known a twin, with all that is in it, in place; returns it.

    Args:
        vocabulary: whether its embedding is divided, too.

    Raises:
        LookupError: its family is not known.
    """
    family = family_of(module)
    if family is None:
        raise LookupError(f"no family for a {type(module).__name__}: smpar.nn.families.register_family")
    divide(module, family, group)
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    if vocabulary and isinstance(embedding, nn.Embedding):
        divide_embedding(embedding, group)
    return become(module, Outermost, group, places=Places(module.forward))


def heads_of(module: nn.Module) -> nn.Module | None:
    """The linear of a transformers model that gives logits over its vocabulary, if it has one."""
    get = getattr(module, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Linear) else None
