"""The configuration of ``smpar.init``: one frozen record, checked key by key. Pure.

Keys and defaults are those of SMP (arXiv 2111.05972, section 3); each field below carries its own check, so the
table of keys is the dataclass itself.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from smpar.errors import ConfigError, MeshError, NotBuiltYet
from smpar.mesh import placement_letters

ENVIRONMENT_KEY = "SM_HP_MP_PARAMETERS"
ALIASES = {"partitions": "pipeline_parallel_degree"}
SMP_PIPELINES = ("interleaved", "simple")
VIRTUAL_STAGES = {"interleaved_1f1b": 2, "zbv": 2}  # where several are the point of the schedule
MEMORY_WEIGHTS = {"memory": 0.8, "speed": 0.2}

# key -> why it changes nothing; said once, when the user gives it a value other than its default
MOOT = {
    "ddp": "data and tensor parallelism need no switch",
    "ddp_port": "the launcher's address and port are used",
    "ddp_dist_backend": "NCCL is used for CUDA tensors and gloo for others",
    "deterministic_server": "there is no module server; every run is deterministic",
    "contiguous": "transfers are always contiguous",
    "horovod": "data parallelism uses torch.distributed",
    "fast_mode": "activations always go straight from the stage that makes them to the stage that uses them",
    "checkpoint_attentions": "use smpar.set_activation_checkpointing(module) on the attention modules",
    "activation_loading_horizon": "it needs offload_activations",
}

log = logging.getLogger("smpar")

Check = Callable[[str, Any], Any]


def _wrong(key: str, value: Any, must: str, example: Any) -> ConfigError:
    return ConfigError(
        f"`{key}` must be {must}",
        f"{value!r} ({type(value).__name__})",
        f"smpar.init({{{key!r}: {example!r}}})",
    )


def _flag(default: bool) -> Any:
    def check(key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise _wrong(key, value, "True or False", default)
        return value

    return field(default=default, metadata={"check": check})


def _count(default: int, least: int = 1) -> Any:
    def check(key: str, value: Any) -> int:
        # bool is an int, and 2.0 is what some JSON writers make of 2
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong(key, value, f"a whole number, {least} or more", max(default, least))
        return value

    return field(default=default, metadata={"check": check})


def _number(default: float, low: float = 0.0, high: float = float("inf")) -> Any:
    def check(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _wrong(key, value, f"a number from {low:g} to {high:g}", default)
        return float(value)

    return field(default=default, metadata={"check": check})


def _choice(default: str, *others: str) -> Any:
    def check(key: str, value: Any) -> str:
        names = (default, *others)
        if not isinstance(value, str) or value.lower() not in names:
            raise _wrong(key, value, "one of " + ", ".join(names), default)
        return value.lower()

    return field(default=default, metadata={"check": check})


def _placement(default: str) -> Any:
    def check(key: str, value: Any) -> str:
        try:
            placement_letters(str(value))
        except MeshError as error:
            raise ConfigError(error.rule, error.values, error.fix) from None
        return str(value)

    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Config:
    """What ``smpar.init`` was told, complete with defaults. Make it with `from_dict` or `from_environment`.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or contradicts another.
        NotBuiltYet: a value asks for something that this version does not do.
    """

    pipeline_parallel_degree: int = _count(1)
    tensor_parallel_degree: int = _count(1)
    microbatches: int = _count(1)
    active_microbatches: int = _count(0, least=0)  # 0 = the schedule's own; degree + 2 for SMP's
    pipeline: str = _choice("interleaved", "simple", "gpipe", "1f1b", "interleaved_1f1b", "zb", "zbv")
    virtual_stages: int = _count(0, least=0)  # 0 = take the default of the schedule
    placement_strategy: str = _placement("cluster")
    auto_partition: bool = _flag(True)
    default_partition: int = _count(0, least=0)
    optimize: str = _choice("memory", "speed")
    memory_weight: float = _number(-1.0, low=0.0, high=1.0)  # -1 = take the default, which `optimize` sets
    ddp: bool = _flag(False)
    ddp_port: int | None = field(default=None, metadata={"check": lambda key, value: value})
    ddp_dist_backend: str = _choice("auto", "nccl", "gloo", "mpi")
    deterministic_server: bool = _flag(False)
    contiguous: bool = _flag(True)
    horovod: bool = _flag(False)
    shard_optimizer_state: bool = _flag(False)
    sharded_data_parallel_degree: int = _count(1)
    sdp_reduce_bucket_size: int = _count(500_000_000)
    sdp_param_persistence_threshold: int = _count(1_000_000, least=0)
    sdp_max_live_parameters: int = _count(1_000_000_000)
    sdp_hierarchical_allgather: bool = _flag(True)
    sdp_gradient_clipping: float = _number(1.0)
    fp16: bool = _flag(False)
    bf16: bool = _flag(False)
    fp16_params: bool = _flag(False)
    fp32_grad_accumulation: bool = _flag(False)
    prescaled_batch: bool = _flag(False)
    offload_activations: bool = _flag(False)
    activation_loading_horizon: int = _count(4)
    checkpoint_attentions: bool = _flag(False)
    skip_tracing: bool = _flag(False)
    static_mode: bool = _flag(True)
    fast_mode: bool = _flag(False)
    delayed_parameter_initialization: bool = _flag(False)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None = None) -> Config:
        """Checks and completes the user's keys.

        Args:
            given: keys of SMP's configuration, plus ``virtual_stages``; None is an empty dict.

        Raises:
            ConfigError: an unknown key (names the nearest), a wrong value, or a contradiction.
            NotBuiltYet: a feature that this version lacks.
        """
        given = _without_aliases(dict(given or {}))
        checks: dict[str, Check] = {f.name: f.metadata["check"] for f in fields(cls)}
        for key in given:
            if key not in checks:
                raise _unknown(key, [*checks, *ALIASES])
        if given.get("auto_partition") is False and "default_partition" not in given:
            raise ConfigError(
                "manual partition needs `default_partition`, the stage of modules outside every smpar.partition",
                "auto_partition = False and no default_partition",
                'smpar.init({"auto_partition": False, "default_partition": 0, ...})',
            )
        values = {key: checks[key](key, value) for key, value in given.items()}
        degree = values.get("pipeline_parallel_degree", 1)
        pipeline = values.setdefault("pipeline", "interleaved")
        for key, default in (
            ("active_microbatches", degree + 2 if pipeline in SMP_PIPELINES else 0),
            ("virtual_stages", VIRTUAL_STAGES.get(pipeline, 1)),
        ):
            if values.setdefault(key, default) == 0 and key in given:
                raise _wrong(key, 0, "a whole number, 1 or more", default or degree + 2)
        values.setdefault("memory_weight", MEMORY_WEIGHTS[values.get("optimize", "memory")])
        config = cls(**values)
        _refuse_contradictions(config)
        _refuse_unbuilt(config)
        _say_moot(config, given)
        return config

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The configuration in the variable ``SM_HP_MP_PARAMETERS``, a JSON object; all defaults if it is not set.

        Raises:
            ConfigError: the variable is not a JSON object; and as `from_dict`.
        """
        text = environ.get(ENVIRONMENT_KEY, "")
        if not text.strip():
            return cls.from_dict({})
        try:
            given = json.loads(text)
        except ValueError as error:
            given = error
        if not isinstance(given, dict):
            raise ConfigError(
                f"the environment variable {ENVIRONMENT_KEY} must be a JSON object",
                f"{text[:200]!r}" + (f": {given}" if isinstance(given, ValueError) else ""),
                f"export {ENVIRONMENT_KEY}='{{\"pipeline_parallel_degree\": 2}}'",
            )
        return cls.from_dict(given)

    @property
    def stages(self) -> int:
        """Number of pipeline stages, virtual ones included."""
        return self.pipeline_parallel_degree * self.virtual_stages

    @property
    def placement(self) -> str:
        """The placement as three letters, slowest axis first."""
        return placement_letters(self.placement_strategy)

    def to_dict(self) -> dict[str, Any]:
        """All keys with their values; `from_dict` reads it back."""
        return asdict(self)


def _without_aliases(given: dict[str, Any]) -> dict[str, Any]:
    for alias, key in ALIASES.items():
        if alias not in given:
            continue
        value = given.pop(alias)
        if key in given and given[key] != value:
            raise ConfigError(
                f"`{alias}` is another name of `{key}`; give one of them",
                f"{alias} = {value!r}, {key} = {given[key]!r}",
                f"smpar.init({{{key!r}: {given[key]!r}}})",
            )
        given[key] = value
    return given


def _unknown(key: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return ConfigError(
        "every key of the configuration must be a known one",
        f"{key!r}",
        f"did you mean {near[0]!r}?" if near else "remove it; known keys: " + ", ".join(sorted(known)),
    )


def _refuse_contradictions(config: Config) -> None:
    if config.pipeline == "zbv" and config.virtual_stages != 2:
        raise ConfigError(
            "the pipeline 'zbv' has two stages on each rank, one on the way down and one on the way back",
            f"virtual_stages = {config.virtual_stages}",
            "leave out 'virtual_stages', or take 'interleaved_1f1b'",
        )
    if config.default_partition >= config.stages:
        raise ConfigError(
            "`default_partition` must be a stage: at least 0 and below pipeline_parallel_degree x virtual_stages",
            f"default_partition = {config.default_partition}, "
            f"pipeline_parallel_degree = {config.pipeline_parallel_degree}, virtual_stages = {config.virtual_stages}",
            'smpar.init({"default_partition": 0, ...})',
        )


def _refuse_unbuilt(config: Config) -> None:
    asked = {
        "train in fp16": ("fp16", config.fp16),
        "train in bf16": ("bf16", config.bf16),
        "keep parameters in fp16": ("fp16_params", config.fp16_params),
        "shard the optimizer state": ("shard_optimizer_state", config.shard_optimizer_state),
        "shard parameters over data-parallel ranks": (
            "sharded_data_parallel_degree",
            config.sharded_data_parallel_degree > 1,
        ),
        "offload activations": ("offload_activations", config.offload_activations),
        "initialize parameters stage by stage": (
            "delayed_parameter_initialization",
            config.delayed_parameter_initialization,
        ),
    }
    for what, (key, yes) in asked.items():
        if yes:
            raise NotBuiltYet(
                f"this version does not {what}",
                f"{key} = {getattr(config, key)!r}",
                f"leave out {key!r}",
            )


def _say_moot(config: Config, given: Mapping[str, Any]) -> None:
    for f in fields(config):
        why = MOOT.get(f.name)
        if why is None and f.name.startswith("sdp_"):
            why = "it needs sharded_data_parallel_degree above 1"
        if why is not None and f.name in given and getattr(config, f.name) != f.default:
            # every script written for SMP sets ddp, so that is no news to its user
            level = logging.INFO if f.name.startswith("ddp") else logging.WARNING
            _say_once(level, f"configuration key {f.name!r} has no effect: {why}")


@functools.cache
def _say_once(level: int, message: str) -> None:
    log.log(level, message)
