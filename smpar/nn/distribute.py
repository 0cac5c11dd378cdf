"""Replacing what was asked for by twins."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smpar.comm.messages import CommGroup, allgather
from smpar.comm.peers import Peers
from smpar.errors import ModelsDiffer, OtherDtype
from smpar.nn.families import divide_model, family_of, heads_of
from smpar.nn.family import VOCABULARY, matching
from smpar.nn.group import TensorGroup
from smpar.nn.leaves import divide_leaf, is_leaf
from smpar.nn.linears import divide_linear
from smpar.nn.marks import mark_of
from smpar.nn.module import DistributedModule
from smpar.nn.pairs import divide_pair, pairs_in
from smpar.nn.registry import registration_of, replacement
from smpar.nn.vocabulary import divide_embedding, divide_head, whole_because
from smpar.runtime.core import runtime
from smpar.runtime.partitioning import pins_of, set_partition
from smpar.runtime.replicas import broadcast, module_state
from smpar.slices import slicing_of, whole_shape

log = logging.getLogger("smpar")

# Modules of torch's that read the weights of their parts, instead of calling these.
READ_THEIR_PARTS = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


def distribute(module: nn.Module, group: TensorGroup) -> nn.Module:
    """Divide what was asked for, in place where that can be; returns what takes the module's place.

    A group without processes is one that is only traced or measured: there is nobody to agree with.

    Of the modules that were asked for with all their parts, the outermost supported ones are divided. Before that, all
    their ranks get the weights of their first one. One that shares a weight with a module that is not divided stays
    whole, and so does what cannot be divided; the log says why.

    Raises:
        ModelsDiffer: ranks would divide different models.
        OtherDtype: the parameters of a module, or its twin, are of another dtype.
        HookMismatch, TwinWeights: see `smpar.nn.registry`.
    """
    if group.size == 1:
        return module
    alone = group.group is None
    if not alone:
        _check_alike(module)
    asked = any(mark_of(part).enabled for part in module.modules())
    if asked:
        module = _Walk(module, group).run()
    divided = [name or "(model)" for name, part in module.named_modules() if isinstance(part, DistributedModule)]
    if divided:
        log.info("smpar: divided over %d ranks: %s", group.size, ", ".join(divided))
    elif not alone:
        log.warning(
            "smpar: tensor_parallel_degree is %d, but %s: every rank holds all of the model. Call "
            "smpar.set_tensor_parallelism(module) before smpar.DistributedModel(module), or make the model in `with "
            "smpar.tensor_parallelism():`",
            group.size, "nothing that was asked for can be divided" if asked else "no module was asked to be divided",
        )  # fmt: skip
    return module


def _check_alike(module: nn.Module) -> None:
    """Raise ModelsDiffer unless all ranks have the same modules, asked for alike, with parameters of the same kinds."""
    mine = [
        f"{name or '(model)'}: {type(part).__name__}, {'' if mark_of(part).enabled else 'not '}asked for, with "
        + ", ".join(f"{n} {list(whole_shape(p))} {p.dtype}" for n, p in part.named_parameters(recurse=False))
        for name, part in module.named_modules()
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(allgather(digest, CommGroup.WORLD))) == 1:
        return
    everyone = allgather(mine, CommGroup.WORLD)
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[rank], fillvalue="nothing more")
    here, there = next((a, b) for a, b in pairs if a != b)
    raise ModelsDiffer(f"rank 0 has {here}; rank {rank} has {there}")


class Rule(NamedTuple):
    """One kind of module that can be divided.

    Attributes:
        knows: whether a module is of this kind.
        divide: divides it; gives what takes its place, or why it stays.
        apart: parts of it that are seen to elsewhere.
    """

    knows: Callable[[nn.Module], bool]
    divide: Callable[[nn.Module], nn.Module | str]
    apart: Callable[[nn.Module], Collection[nn.Module]] = lambda module: set()


class _Walk:
    """Passes over all modules, from the outside in: first for models and layers, then for what is left of them.

    Attributes:
        owners: the modules that have a parameter, and their names.
        heads: linears that give logits.
        bases: models that were divided by their family.
    """

    def __init__(self, root: nn.Module, group: TensorGroup) -> None:
        self.root, self.group = root, group
        self.owners: dict[Tensor, dict[nn.Module, str]] = {}
        for name, module in root.named_modules():
            for parameter in module.parameters(recurse=False):
                self.owners.setdefault(parameter, {})[module] = name or "(model)"
        self.heads = {head for part in root.modules() if (head := heads_of(part)) is not None}
        self.bases: list[nn.Module] = []

    def run(self) -> nn.Module:
        """What takes the root's place."""
        layers = (
            Rule(lambda m: registration_of(m) is not None, self._replaced),
            Rule(lambda m: family_of(m) is not None, self._model, _inputs_of),
            Rule(is_leaf, self._leaf),
        )
        parts = (
            Rule(self._gives_logits, self._head),
            Rule(_is_embedding, self._embedding),
            Rule(lambda m: type(m) is nn.Linear, self._linear),
        )
        root = self._visit(self.root, "", layers, {})
        self._divide_inputs()
        self._divide_pairs(root)
        return self._visit(root, "", parts, {})

    def _visit(
        self, module: nn.Module, path: str, rules: tuple[Rule, ...], seen: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module in seen or isinstance(module, DistributedModule):
            return seen.get(module, module)
        seen[module] = twin = self._twin(module, path, rules)
        if twin is module and not isinstance(module, (DistributedModule, *READ_THEIR_PARTS)):
            for name, child in list(module._modules.items()):
                if child is not None:
                    module._modules[name] = self._visit(child, f"{path}.{name}".lstrip("."), rules, seen)
        return twin

    def _twin(self, module: nn.Module, path: str, rules: tuple[Rule, ...]) -> nn.Module:
        """What takes a module's place; itself if it stays, or is divided in place."""
        rule = next((rule for rule in rules if rule.knows(module)), None)
        if rule is None or not mark_of(module).enabled:
            return module
        why = self._obstacle(module, rule.apart(module))
        if not why:
            _make_alike(module, self.group)
            made = rule.divide(module)
            if isinstance(made, nn.Module):
                _check_dtypes(made, path)
                return made
            why = made
        log.warning("smpar: %s (%s) is not divided as a whole: %s", path or "(model)", type(module).__name__, why)
        return module

    def _obstacle(self, module: nn.Module, apart: Collection[nn.Module]) -> str:
        """Why a module stays whole; empty if nothing is known that speaks against dividing it."""
        inside = {part: name for name, part in module.named_modules() if part not in apart}
        for part, name in inside.items():
            if not mark_of(part).enabled:
                return f"its part {name} ({type(part).__name__}) was not asked for"
            if hasattr(part, "parametrizations"):
                return f"{name or 'it'} has parametrizations"
            for parameter in part.parameters(recurse=False):
                if not parameter.is_floating_point():
                    return f"it has a parameter of {parameter.dtype}"
                others = [name for owner, name in self.owners[parameter].items() if owner not in inside
                          and not (module in self.heads and module in owner.modules())]  # fmt: skip
                if others and not self._vocabulary_divides(parameter):
                    return f"it shares a weight with {others[0]}, which is not divided with it"
        return ""

    # -- vocabularies ---------------------------------------------------------------------------

    def _gives_logits(self, module: nn.Module) -> bool:
        """Whether it is an output layer: known as one, or a linear with the weight of an embedding."""
        if module in self.heads:
            return True
        return type(module) is nn.Linear and any(isinstance(m, nn.Embedding) for m in self.owners[module.weight])

    def _vocabulary_divides(self, weight: Tensor) -> bool:
        """Whether all modules that have a weight are embeddings and output layers which can be divided."""
        return all(
            (isinstance(owner, nn.Embedding) or self._gives_logits(owner))
            and mark_of(owner).enabled
            and mark_of(owner).options.get("distribute_embedding", True)
            and not whole_because(owner, self.group)
            for owner in self.owners[weight]
        )

    @property
    def _within(self) -> set[nn.Module]:
        """All that is in models which were divided by their family."""
        return {part for base in self.bases for part in base.modules()}

    def _divide_inputs(self) -> None:
        """Divide the embeddings of divided models, unless models that are whole use them, too."""
        within = self._within
        for embedding in dict.fromkeys(part for base in self.bases for part in _inputs_of(base)):
            users = (part for part in self.root.modules() if embedding in _inputs_of(part))
            if self._vocabulary_divides(embedding.weight) and all(user in within for user in users):
                for owner in self.owners[embedding.weight]:
                    if isinstance(owner, nn.Embedding):
                        divide_embedding(owner, self.group, outermost=owner not in within)

    def _whole_vocabulary(self, module: nn.Module, weight: Tensor) -> str:
        """Why an embedding or output layer stays whole, outside of divided models; empty if it does not."""
        if why := whole_because(module, self.group):
            return why
        within = self._within
        for owner, name in self.owners[weight].items():
            twin = isinstance(owner, DistributedModule)
            if isinstance(owner, nn.Embedding) and not twin and (owner in within or not _is_embedding(owner)):
                return f"it shares its weight with {name}, which stays whole"
        return "" if self._vocabulary_divides(weight) else "it shares its weight with what was not asked for"

    def _head(self, module: nn.Module) -> nn.Module | str:
        assert isinstance(module, nn.Linear)
        why = self._whole_vocabulary(module, module.weight)
        if not why:
            divide_head(module, self.group)
        return why or module

    def _embedding(self, module: nn.Module) -> nn.Module | str:
        assert isinstance(module, nn.Embedding)
        why = self._whole_vocabulary(module, module.weight)
        if not why:
            divide_embedding(module, self.group, outermost=True)
        return why or module

    # -- the rest -------------------------------------------------------------------------------

    def _replaced(self, module: nn.Module) -> nn.Module | str:
        if any(getattr(part, hooks) for part in module.modules() for hooks in ("_forward_hooks", "_forward_pre_hooks")):
            return "it has hooks, which its twin would not call"
        made = replacement(module, mark_of(module).options, self.group)
        if isinstance(made, nn.Module) and module in (pins := pins_of(module)):
            set_partition(made, pins[module])
        return made

    def _model(self, module: nn.Module) -> nn.Module | str:
        self.bases.append(module)
        return divide_model(module, self.group, vocabulary=False)

    def _leaf(self, module: nn.Module) -> nn.Module | str:
        return divide_leaf(module, self.group) or "it has fewer heads than there are ranks"

    def _divide_pairs(self, module: nn.Module) -> None:
        """Divide linears that follow upon each other, in a module that is not divided and in those inside it."""
        if isinstance(module, (DistributedModule, *READ_THEIR_PARTS)):
            return
        for pair in pairs_in(module) if mark_of(module).enabled else ():
            linears = (*pair.columns, pair.rows)
            enough = pair.rows.in_features >= self.group.size
            ready = enough and all(mark_of(x).enabled and not isinstance(x, DistributedModule) for x in linears)
            if ready and not any(self._gives_logits(x) or self._obstacle(x, ()) for x in linears):
                for linear in linears:
                    _make_alike(linear, self.group)
                divide_pair(pair, self.group)
        for child in module.children():
            self._divide_pairs(child)

    def _linear(self, module: nn.Module) -> nn.Module | str:
        assert isinstance(module, nn.Linear)
        return divide_linear(module, self.group) or "it has fewer features than there are ranks"


def _is_embedding(module: nn.Module) -> bool:
    """Whether it is called as ``nn.Embedding`` is."""
    return type(module).forward is nn.Embedding.forward


def _inputs_of(module: nn.Module) -> dict[nn.Embedding, None]:
    """The embeddings of a model whose family is known: what it says itself, and what the plan says."""
    family = family_of(module)
    if family is None:
        return {}
    parts = dict(module.named_modules())
    found = [parts[name] for name, style in matching(family.plan, parts) if style == VOCABULARY]
    found.append(getattr(module, "get_input_embeddings", lambda: None)())
    return {part: None for part in found if isinstance(part, nn.Embedding)}


def _make_alike(module: nn.Module, group: TensorGroup) -> None:
    """Give all ranks of a stage the first one's parameters and buffers, one after another."""
    if group.group is None:
        return
    world = runtime().world
    peers = Peers.along(world, "dp")
    with world.guard(), torch.no_grad():
        for tensor in module_state(module):
            if slicing_of(tensor) is None and not tensor.is_meta:
                there = tensor.detach().to(world.device)
                broadcast([there], lambda _: peers, 0)
                tensor.copy_(there)


def _check_dtypes(module: nn.Module, path: str) -> None:
    """Raise OtherDtype if slices in a twin are of several dtypes, but for what transformers keeps in float32."""
    kept = {name for names in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for name in getattr(module, names, None) or ()}  # fmt: skip
    found: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if slicing_of(parameter) is not None and not kept.intersection(name.split(".")):
            found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        kinds = ", ".join(f"{name} {dtype}" for dtype, name in found.items())
        raise OtherDtype(f"{path or '(model)'} ({type(module).__name__}) with {kinds}")
