"""All ranks' spans in one file that Perfetto (ui.perfetto.dev) and chrome://tracing read.

    process = rank, its threads:

    compute    |step 3 ................................|
               |agree|0F0    |0F1    |0B0    |0B1    |..
    waits            |                |wait|
    messages                |send| ↘ arrows go from a send to the wait that received it, on another rank

Times are microseconds since the first span. Ranks of one machine share a clock; machines are aligned by leaving
barriers together. The format is Chrome's "Trace Event Format".
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smpar.comm.messages import CommGroup, RankType, allgather, barrier, recv_from, send
from smpar.comm.world import World
from smpar.errors import SmparError
from smpar.observe.spans import Span, Spans

log = logging.getLogger("smpar")

_THREADS = {"step": 0, "phase": 0, "action": 0, "wait": 1, "send": 2}
_NAMES = ("compute", "waits", "messages")
_PATIENCE = 10.0  # seconds that a rank waits for the others before it writes alone
_BARRIERS = 5  # whose median aligns the clocks of machines


def write_trace(spans: Spans, world: World, folder: str) -> Path | None:
    """Gather the spans of all ranks, which call this together, and write ``folder/trace.json`` on rank 0.

    When a rank has failed, or does not come in ten seconds, each writes its own ``folder/trace.rank<rank>.json``.

    Returns:
        the file that this rank wrote, if it did.
    """
    mine = spans.take()
    try:
        # A rank on its way out with an exception does not expect the others to come too.
        if world.watch is not None and not world.watch.meet(0.0 if sys.exc_info()[0] else _PATIENCE):
            return _write_alone(mine, spans.dropped, world, folder)
        with world.translating():
            return _write_together(mine, spans.dropped, world, folder)
    except (SmparError, RuntimeError) as error:
        log.info("smpar: gathering the ranks' traces failed: %s", error)
        return _write_alone(mine, spans.dropped, world, folder)


def _write_alone(mine: list[Span], dropped: int, world: World, folder: str) -> Path:
    path = Path(folder, f"trace.rank{world.rank}.json")
    first = min((s.start for s in mine), default=0)
    _write(path, rank_events(world.rank, _label(world), mine, first, dropped))
    return path


def _write_together(mine: list[Span], dropped: int, world: World, folder: str) -> Path | None:
    stamps = []
    for _ in range(_BARRIERS if world.size > 1 else 0):
        barrier()
        stamps.append(time.monotonic_ns())
    first = min((s.start for s in mine), default=None)
    ranks = allgather((world.instance_id, stamps, first), CommGroup.WORLD)
    shifts = clock_shifts([r[0] for r in ranks], [r[1] for r in ranks])
    start = min((f + shift for (_, _, f), shift in zip(ranks, shifts, strict=True) if f is not None), default=0)
    if world.rank != 0:  # one after another, so that rank 0 holds the spans of one rank at a time
        send((_label(world), mine, dropped), 0, RankType.WORLD_RANK)
        return None

    def events() -> Iterator[dict[str, Any]]:
        yield from rank_events(0, _label(world), mine, start, dropped)
        for rank in range(1, world.size):
            label, theirs, lost = recv_from(rank, RankType.WORLD_RANK)
            yield from rank_events(rank, label, theirs, start - shifts[rank], lost)

    path = Path(folder, "trace.json")
    _write(path, events())
    return path


def _label(world: World) -> str:
    parts = [f"stage {world.axis_rank('pp')}"]
    if world.axis_size("rdp") > 1:
        parts.append(f"replica {world.axis_rank('rdp')}")
    if world.axis_size("tp") > 1:
        parts.append(f"shard {world.axis_rank('tp')}")
    return ", ".join(parts)


def clock_shifts(machines: Sequence[int], stamps: Sequence[Sequence[int]]) -> list[int]:
    """What to add to each rank's times to have those of rank 0's machine, in nanoseconds.

    Args:
        machines: number of each rank's machine.
        stamps: each rank's clock when it left each of several barriers. A machine counts as having left when the
            first of its ranks had.
    """
    left: dict[int, list[int]] = {}
    for machine, times in zip(machines, stamps, strict=True):
        before = left.get(machine)
        left[machine] = list(times) if before is None else [min(a, b) for a, b in zip(before, times, strict=True)]
    home = left[machines[0]]
    shift = {
        machine: round(statistics.median(a - b for a, b in zip(home, times, strict=True))) if times else 0
        for machine, times in left.items()
    }
    return [shift[machine] for machine in machines]


def rank_events(rank: int, label: str, spans: Sequence[Span], start: int, dropped: int) -> Iterator[dict[str, Any]]:
    """One rank's trace events.

    Args:
        label: what the rank is, beside its number.
        start: the time, on this rank's clock in nanoseconds, that is 0 in the file.
        dropped: how many spans were forgotten.
    """
    name = f"rank {rank} ({label})" + (f", {dropped} earlier spans dropped" if dropped else "")
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for thread, title in enumerate(_NAMES):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
    for span in spans:
        place = {"pid": rank, "tid": _THREADS[span.category]}
        at = (span.start - start) / 1e3
        lasting = (span.end - span.start) / 1e3
        yield {
            "ph": "X", "name": span.name, "cat": span.category, "ts": at, "dur": lasting, **place, "args": span.details
        }  # fmt: skip
        flow = span.details.get("flow")
        if flow is not None:
            # Arrows are tied to the slice that they touch, so they begin and end just inside of it.
            inside = min(lasting / 2, 1e-3)
            if span.category == "send":
                end = {"ph": "s", "ts": at + inside}
            else:
                end = {"ph": "f", "bp": "e", "ts": at + lasting - inside}
            yield {**end, "name": "message", "cat": "message", "id": flow, **place}


def _write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write event by event; the file is there only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
    os.replace(part, path)
    log.info("smpar: wrote %s", path)
