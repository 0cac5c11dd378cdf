"""Plans as tables: what each takes, why it lost, and how the best one lies on the cluster.

::

       degrees      schedule  microbatches  per step  samples/s  bubble  fullest device
    1  pp 2 x dp 4  zbv x 2   16 of 1         5.81 s       11.0     1 %  12.1 of 15.8 GiB
    2  pp 2 x dp 4  zbv x 2   8 of 2          5.83 s       11.0     2 %  12.4 of 15.8 GiB

    why the others lost
    2  +0.4 %: bubble and transfers cost 147 ms against 70.8 ms

    stage  rank  layers        devices       forward  backward  receives  reduction  memory of the rank
        0     0  wte, h.0-9    0-3 (V100)      66 ms    132 ms       0 s      12 ms    12.1 of 15.8 GiB
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from smpar.describe.names import compress
from smpar.describe.numbers import count, duration, memory, percent, ranges
from smpar.planner.plans import Plan, Plans

_LISTED = 16  # nodes that have a line each
_WIDTH = 120  # of tables that do not go to a terminal


def plans_text(plans: Plans, width: int = _WIDTH) -> str:
    """The tables as plain text.

    Args:
        width: in columns, at least 80; longer cells are folded.
    """
    text = io.StringIO()
    _print(plans, Console(file=text, width=max(80, width), color_system=None))
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def show_plans(plans: Plans) -> None:
    """Print the tables: as wide as the terminal, or `plans_text` into a pipe."""
    if sys.stdout.isatty():
        _print(plans, Console())
    else:
        print(plans_text(plans), end="", flush=True)


def _print(plans: Plans, console: Console) -> None:
    for part in (
        ranking(plans),
        searched(plans),
        *undivided(plans),
        *lost(plans),
        "",
        "the best plan, stage by stage (times of one microbatch; reduction once a step)",
        stages(plans.best),
        "",
        *placement(plans.best),
    ):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def _table(columns: Mapping[str, bool]) -> Table:
    """Columns with their names -> whether they hold numbers, which are never folded."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, number in columns.items():
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def ranking(plans: Plans) -> Table:
    """A line for each plan, the best first."""
    table = _table(
        {"": True, "degrees": False, "schedule": False, "microbatches": False, "per step": True, "samples/s": True,
         "bubble": True, "fullest device": True}
    )  # fmt: skip
    for number, plan in enumerate(plans, 1):
        table.add_row(
            str(number),
            *of_strategy(plan),
            duration(plan.prediction.seconds),
            count(plan.samples_per_second),
            percent(plan.prediction.bubble, 1.0),
            fullest(plan),
        )
    return table


def lost(plans: Plans) -> list[str]:
    """Why each plan but the best is slower; no lines if there is only one."""
    reasons = [
        f"{number:>2}  {plan.why or 'as fast'}" for number, plan in enumerate(plans, 1) if plan is not plans.best
    ]
    return ["", "why the others lost", *reasons] if reasons else []


def of_strategy(plan: Plan) -> tuple[str, str, str]:
    """Degrees, schedule and microbatches in words: ``pp 2 x dp 4``, ``zbv x 2``, ``16 of 1``."""
    s = plan.strategy
    degrees = " x ".join(f"{name} {n}" for name, n in (("tp", s.tp), ("pp", s.pp), ("dp", s.dp)) if n > 1)
    schedule = s.schedule + (f" x {s.virtual_stages}" if s.virtual_stages > 1 else "")
    extras = ", recompute" * any(s.recompute) + ", sharded optimizer" * s.shard_optimizer
    return degrees or "one device", schedule + extras, f"{s.microbatches} of {s.microbatch}"


def fullest(plan: Plan) -> str:
    """Memory of the device that has the least left: ``12.1 of 15.8 GiB``."""
    need, limit = min(zip(plan.prediction.memory, plan.prediction.limits, strict=True), key=lambda x: x[1] - x[0])
    return filled(need, limit)


def filled(need: float, limit: float) -> str:
    """``12.1 of 15.8 GiB``; the first unit is left out where both are the same."""
    (amount, unit), whole = memory(need).split(), memory(limit)
    return f"{amount if whole.endswith(unit) else memory(need)} of {whole}"


def searched(plans: Plans) -> str:
    """What the search looked at, in one line."""
    words = {
        "simulated": "simulated",
        "bounded": "could not be faster than these",
        "too large": "too large for the memory",
    }
    ends = ", ".join(f"{number} {words.get(name, name)}" for name, number in plans.counts.items() if number)
    line = f"{ends}; the search took {duration(plans.seconds)}"
    return line if plans.complete else f"{line} and was interrupted: the best so far"


def undivided(plans: Plans) -> list[str]:
    """Why no plan has tensor parallelism, if that was looked for."""
    why = plans.model.profile.undivided if plans.model is not None else ""
    return [f"no tensor parallelism: {why}"] if why else []


def stages(plan: Plan) -> Table:
    """A line for each stage: its layers, devices and costs."""
    strategy, prediction = plan.strategy, plan.prediction
    table = _table(
        {"stage": True, "rank": True, "layers": False, "devices": False, "forward": True, "backward": True,
         "receives": True, "reduction": True, "memory of the rank": True}
    )  # fmt: skip
    told: set[int] = set()
    for index, (stage, rank) in enumerate(zip(prediction.stages, strategy.ranks, strict=True)):
        here = "as above" if rank in told else filled(prediction.memory[rank], prediction.limits[rank])
        told.add(rank)
        table.add_row(
            str(index),
            str(rank),
            layers_of(plan, index),
            devices_of(plan, rank),
            duration(stage.forward),
            duration(stage.backward) + " †" * strategy.recomputes(index),
            duration(stage.receives),
            duration(stage.reduction),
            here,
        )
    return table


def layers_of(plan: Plan, stage: int) -> str:
    """The layers of a stage in few words: ``wte, h.0-9``."""
    first, end = plan.prediction.stages[stage].layers
    others = [*plan.layers[:first], *plan.layers[end:]]
    return compress(plan.layers[first:end], others)


def devices_of(plan: Plan, rank: int) -> str:
    """The devices of a pipeline rank by type: ``0-3 (V100)``."""
    strategy = plan.strategy
    kinds: dict[str, list[int]] = {}
    for replica in range(strategy.dp):
        for device in strategy.group(rank, replica):
            kinds.setdefault(plan.cluster.type_of(device).name, []).append(device)
    return ", ".join(f"{ranges(sorted(devices))} ({kind})" for kind, devices in kinds.items())


def placement(plan: Plan) -> list[str]:
    """A line for each node: what runs on its devices, as replica and pipeline rank; fewer lines for many nodes."""
    strategy, nodes = plan.strategy, plan.cluster.nodes
    at = {
        strategy.place(p, d, t): (p, d, t)
        for p in range(strategy.pp)
        for d in range(strategy.dp)
        for t in range(strategy.tp)
    }
    names = "r replica, p pipeline rank" + (", t shard" if strategy.tp > 1 else "")
    lines = [f"devices of each node ({names}; - unused)"]
    places = [[at.get(start + i) for i in range(n.count)] for start, n in zip(plan.cluster.starts, nodes, strict=True)]
    for first, end in _alike(plan, places):
        node = nodes[first]
        name = f"node {first}" if end == first + 1 else f"nodes {first}-{end - 1}"
        told = _in_words([place for here in places[first:end] for place in here], strategy.tp, end == first + 1)
        lines.append(f"  {name} {node.name} ({node.count} {node.device}): {told}")
    if any(strategy.recompute):
        lines.append("† runs its forward again in its backward")
    return lines


_Place = tuple[int, int, int] | None


def _alike(plan: Plan, places: Sequence[Sequence[_Place]]) -> list[tuple[int, int]]:
    """Nodes that get one line; in a cluster of many, neighbours of one kind that hold the same pipeline ranks."""
    nodes = plan.cluster.nodes
    if len(nodes) <= _LISTED:
        return [(i, i + 1) for i in range(len(nodes))]
    kinds = [(node, {p and p[0] for p in here}) for node, here in zip(nodes, places, strict=True)]
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    return list(zip(starts, [*starts[1:], len(nodes)], strict=True))


def _in_words(places: Sequence[_Place], tp: int, each: bool) -> str:
    if each:
        return " ".join(f"r{p[1]}p{p[0]}" + (f"t{p[2]}" if tp > 1 else "") if p else "-" for p in places)
    used = [p for p in places if p]
    if not used:
        return "-"
    ranks, replicas = (ranges(sorted({p[axis] for p in used})) for axis in (0, 1))
    return f"p{ranks} of r{replicas}" + (f", {len(places) - len(used)} unused" if len(used) < len(places) else "")
