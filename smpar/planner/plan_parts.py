"""The parts of a plan file, each looked at before it is believed: people edit such files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from smpar.errors import PlanFileError, SmparError
from smpar.planner.cost import Prediction, Stage
from smpar.planner.parts import Parts
from smpar.planner.strategy import Strategy

FIX = "write one with `smpar plan ... -o plan.json`"


def read_layers(given: Any) -> tuple[str, ...]:
    """Names of layers.

    Raises:
        PlanFileError: they are something else.
    """
    return _several(given, "layers", lambda x: isinstance(x, str), "a name")


def read_strategy(given: Any, layers: int, devices: int) -> Strategy:
    """A strategy for so many layers on a cluster of so many devices.

    Raises:
        PlanFileError: it is none, or its parts do not fit together.
    """
    fields = _object(given, "strategy")
    for name in ("tp", "pp", "dp", "microbatch", "microbatches", "virtual_stages"):
        _must(
            _whole(fields.get(name)) and fields[name] >= 1,
            f"strategy.{name}",
            "a whole number, 1 or more",
            fields.get(name),
        )
    _must(isinstance(fields.get("schedule"), str), "strategy.schedule", "a name", fields.get("schedule"))
    shard = fields.get("shard_optimizer", False)
    _must(isinstance(shard, bool), "strategy.shard_optimizer", "true or false", shard)
    for name in ("cuts", "devices"):
        fields[name] = _several(fields.get(name), f"strategy.{name}", _whole, "a whole number")
    fields["recompute"] = _several(
        fields.get("recompute", ()), "strategy.recompute", lambda x: isinstance(x, bool), "true or false"
    )
    strategy = Strategy(**fields)
    _check_stages(strategy, layers)
    width = strategy.tp * strategy.pp * strategy.dp
    different = len(set(strategy.devices))
    if not different == len(strategy.devices) == width:
        raise PlanFileError(
            "a plan has one device for each place of its degrees",
            f"{different} different devices for {strategy.tp} x {strategy.pp} x {strategy.dp}",
            FIX,
        )
    if not 0 <= min(strategy.devices) <= max(strategy.devices) < devices:
        raise PlanFileError(
            "a plan runs on devices of its cluster", f"devices {strategy.devices}; the cluster has {devices}", FIX
        )
    return strategy


def _check_stages(strategy: Strategy, layers: int) -> None:
    try:
        stages = len(strategy.ranks)
    except SmparError as error:
        raise PlanFileError(error.rule, error.values, error.fix) from None
    cuts = strategy.cuts
    if len(cuts) != stages or cuts[0] != 0 or list(cuts) != sorted(set(cuts)) or cuts[-1] >= layers:
        raise PlanFileError(
            "a plan cuts its layers into as many stages as its degrees say, from 0 on, ascending",
            f"cuts {cuts} of {layers} layers for {stages} stages",
            FIX,
        )
    if len(strategy.recompute) not in (0, stages):
        raise PlanFileError(
            "a plan says of each stage whether it recomputes",
            f"recompute {strategy.recompute} for {stages} stages",
            FIX,
        )


def read_prediction(given: Any, strategy: Strategy) -> Prediction:
    """What such a strategy was predicted to cost.

    Raises:
        PlanFileError: it is something else.
    """
    fields = _object(given, "prediction")
    for name in ("seconds", "pipeline", "reduction", "optimizer", "bubble"):
        _must(_number(fields.get(name)), f"prediction.{name}", "a finite number", fields.get(name))
    _must(fields["seconds"] > 0, "prediction.seconds", "above 0", fields["seconds"])
    for name in ("memory", "limits"):
        fields[name] = _several(fields.get(name), f"prediction.{name}", _number, "a finite number", strategy.pp)
    of = fields.get("stages")
    stages = _several(of, "prediction.stages", lambda x: isinstance(x, Mapping), "an object", strategy.stages)
    fields["stages"] = tuple(_stage(stage, f"prediction.stages[{i}]") for i, stage in enumerate(stages))
    return Prediction(**fields)


def _stage(given: Any, where: str) -> Stage:
    fields = _object(given, where)
    fields["layers"] = _several(fields.get("layers"), f"{where}.layers", _whole, "a whole number", 2)
    for name, value in fields.items():
        _must(name == "layers" or _number(value), f"{where}.{name}", "a finite number", value)
    return Stage(**fields)


def read_parts(given: Any, strategy: Strategy) -> Parts | None:
    """What such a strategy's step is made of; None if that was not kept.

    Raises:
        PlanFileError: it is something else.
        PlanError: a pipeline's numbers contradict each other.
    """
    if given is None:
        return None
    parts = Parts.from_dict(_object(given, "parts"))
    size = len(parts.pipelines)
    _several(parts.kinds, "parts.kinds", lambda x: _whole(x) and x < size, "the number of a pipeline", strategy.dp)
    _several(parts.reductions, "parts.reductions", _seconds, "a number, 0 or more", strategy.stages)
    _several(parts.steps, "parts.steps", _seconds, "a number, 0 or more", strategy.pp)
    for i, (stages, seconds) in enumerate(parts.tied):
        name = f"parts.tied[{i}]"
        _several(stages, f"{name}[0]", lambda x: _whole(x) and x < strategy.stages, "the number of a stage")
        _must(_seconds(seconds), f"{name}[1]", "a number, 0 or more", seconds)
    for i, pipeline in enumerate(parts.pipelines):
        _must(pipeline.ranks == strategy.ranks, f"parts.pipelines[{i}].ranks", f"{strategy.ranks}", pipeline.ranks)
    return parts


def _object(given: Any, where: str) -> dict[str, Any]:
    _must(isinstance(given, Mapping), where, "an object", given)
    return dict(given)


def _several(
    given: Any, where: str, good: Callable[[Any], bool], must: str, count: int | None = None
) -> tuple[Any, ...]:
    _must(isinstance(given, (list, tuple)), where, "a list", given)
    _must(count is None or len(given) == count, where, f"a list of {count}", given)
    for i, value in enumerate(given):
        _must(good(value), f"{where}[{i}]", must, value)
    return tuple(given)


def _must(good: bool, where: str, must: str, value: Any) -> None:
    if not good:
        raise PlanFileError(f"`{where}` of a plan is {must}", f"{value!r}"[:100], f"correct {where}, or {FIX}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _seconds(value: Any) -> bool:
    return _number(value) and value >= 0
