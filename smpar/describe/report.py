"""``smpar.report()`` and ``smpar.timetable()``: what was decided, as a table and as a drawing.

::

    stage  ranks  units                parameters          time per microbatch  memory
    0      0, 2   embed, blocks.0-2    1.2 M (4.8 MB) †    1.31 ms  52 %        61 MB
    1      1, 3   blocks.3-5, head     1.3 M (5.1 MB) †    1.22 ms  48 %        44 MB
    † holds parameters that other stages hold too
    1f1b, 8 microbatches, predicted bubble 12 %
    tied parameters: head.weight on stages 0, 1
"""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from smpar.describe.names import compress
from smpar.describe.numbers import count, duration, percent
from smpar.describe.prediction import Stage, most_in_flight, predict_stages, predict_step, step_shape, transfer
from smpar.errors import NothingRan
from smpar.runtime.core import Runtime, runtime
from smpar.schedule import Program, Schedule, Segment, draw_svg, draw_text, fill_drain, one_f_one_b
from smpar.trace.graph import size

if TYPE_CHECKING:
    from smpar.model import DistributedModel
    from smpar.runtime.pipeline import Pipeline

_WIDTH = 120  # of a table that does not go to a terminal


def report() -> str:
    """Print, on global rank 0, how the model lies on the stages and what that is predicted to cost.

    May be called on all ranks or on some; needs no communication.

    Returns:
        the text, on every rank.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
        ModelError: there is no ``DistributedModel`` yet.
    """
    now = runtime()
    pipeline = now.model.pipeline
    if pipeline is not None and pipeline.partitioned is None:
        into = f"into {pipeline.stages} stages"
        parts: list[Table | str] = [f"The model is not partitioned yet: its first step does it, {into}."]
    else:
        rows = [_whole(now.model)] if pipeline is None else _stages(now, pipeline)
        parts = [_table(now, rows), *_notes(now, rows)]
    text = io.StringIO()
    _print(parts, Console(file=text, width=_WIDTH, color_system=None))
    if now.world.rank == 0:
        if sys.stdout.isatty():
            _print(parts, Console())
        else:
            print(text.getvalue(), end="", flush=True)
    return text.getvalue()


def _print(parts: list[Table | str], console: Console) -> None:
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def _whole(model: DistributedModel) -> Stage:
    held = list(model.parameters())
    return Stage(
        ("(whole model)",),
        sum(p.numel() for p in held),
        sum(p.numel() * p.element_size() for p in held),
        False,
        None,
        None,
    )


def _stages(now: Runtime, pipeline: Pipeline) -> list[Stage]:
    assert pipeline.partitioned is not None
    if pipeline.timetable is not None:
        in_flight = most_in_flight(pipeline.timetable.schedule, step_shape(pipeline.timetable.programs))
    else:  # in program order, all forwards come first
        in_flight = (now.config.microbatches,) * pipeline.stages
    return predict_stages(pipeline.model, pipeline.partitioned, in_flight)


def _table(now: Runtime, rows: list[Stage]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("stage", "ranks", "units", "parameters", "time per microbatch", "memory"):
        table.add_column(name, overflow="fold", no_wrap=name in ("parameters", "time per microbatch", "memory"))
    total = sum(row.seconds or 0.0 for row in rows)
    groups = now.world.mesh.groups("pp")
    pipeline = now.model.pipeline
    placed = pipeline.layout.ranks if pipeline is not None else (0,)
    for stage, row in enumerate(rows):
        others = [name for other in rows if other is not row for name in other.units]
        table.add_row(
            str(stage),
            ", ".join(str(rank) for rank in sorted(group[placed[stage]] for group in groups)),
            compress([n or "(model)" for n in row.units], others) or "nothing",
            f"{count(row.parameters)} ({size(row.parameter_bytes)})" + (" †" if row.tied else ""),
            "not predicted" if row.seconds is None else f"{duration(row.seconds)}  {percent(row.seconds, total)}",
            "not predicted" if row.memory is None else size(row.memory),
        )
    return table


def _notes(now: Runtime, rows: list[Stage]) -> list[str]:
    model = now.model
    if model.pipeline is None:
        return [f"no pipeline: {now.config.microbatches} microbatches one after another"]
    partitioned, timetable = model.pipeline.partitioned, model.pipeline.timetable
    assert partitioned is not None
    layout, graph = partitioned.layout, partitioned.graph
    notes = ["† holds parameters that other stages hold too"] if any(row.tied for row in rows) else []
    if timetable is not None:
        seconds, idle = predict_step(timetable.schedule, step_shape(timetable.programs))
        notes.append(
            f"{timetable.schedule.name}, {len(timetable.programs)} microbatches: "
            f"predicted {duration(seconds)} per step, bubble {100 * idle:.0f} %"
        )
    else:
        notes.append(f"{now.config.microbatches} microbatches in program order, as the step reads values while it runs")
    if graph.units and not any(u.calls for u in graph.units):
        notes.append("partitioned without a trace, by the bytes of parameters")
    else:
        notes.append(f"times are {'measured' if graph.measured else 'counted from operations'}, without transfers")
    tied = [
        f"{layout.parameter_names.get(key, '?')} on stages {', '.join(map(str, sorted(stages)))}"
        for key, stages in layout.holders.items()
        if len(stages) > 1
    ]
    if tied:
        notes.append(f"tied parameters: {'; '.join(tied)}")
    called = {u.name for u in graph.units}
    unused = [name for m in layout.units if (name := layout.names[m]) not in called]
    if unused:
        notes.append(f"units never called: {compress(unused, called)}")
    return notes


def timetable(svg: bool = False, width: int | None = None) -> str:
    """Draw the last step's schedule, to scale by predicted times in seconds.

    Args:
        svg: a self-contained SVG instead of text.
        width: of the time axis: columns (96 unless given), or pixels (1000).

    Raises:
        NotInitialized: ``smpar.init`` has not run.
        ModelError: there is no ``DistributedModel`` yet.
        NothingRan: no step has run, so nothing is planned.
    """
    now = runtime()
    schedule, program = _last_schedule(now)
    if svg:
        return draw_svg(schedule, program, width or 1000, transfer)
    return draw_text(schedule, program, width or 96, transfer)


def _last_schedule(now: Runtime) -> tuple[Schedule, Program]:
    pipeline = now.model.pipeline
    if pipeline is None:  # one rank: each microbatch's backward follows its forward
        alone = Program(1, (Segment(0, 0),), ())
        return one_f_one_b(alone, now.config.microbatches), alone
    if pipeline.timetable is not None:
        last = pipeline.timetable
        return last.schedule, step_shape(last.programs)
    if pipeline.in_order:
        shape = step_shape(pipeline.in_order)
        return dataclasses.replace(fill_drain(shape, len(pipeline.in_order)), name="program order"), shape
    raise NothingRan("no step has run yet")


def metrics(on: bool = True) -> None:
    """Print a line per step on rank 0, from now on; all ranks call this, as each step then gathers from all stages.

    The same as starting with the environment variable ``SMPAR_METRICS=1``.

    Raises:
        NotInitialized: ``smpar.init`` has not run.
    """
    runtime().spans.counting = on
