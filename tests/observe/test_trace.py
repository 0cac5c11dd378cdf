"""One trace file holds all ranks' actions, waits and messages; arrows join the two ends of each message."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smpar.observe.perfetto import clock_shifts, rank_events
from smpar.observe.spans import DeviceClock, Span, Spans
from tests.harness import Pool
from tests.observe import models


def test_all_ranks_in_one_file(pool: Pool, seed: int, tmp_path: Path) -> None:
    degree, steps = 3, 2
    sent = pool.run(degree, models.traced, degree, seed, steps, str(tmp_path / "trace"))
    assert [p.name for p in (tmp_path / "trace").iterdir()] == ["trace.json"]
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    actions = Counter((e["pid"], e["name"]) for e in slices if e["cat"] == "action")
    assert actions == {(rank, f"{rank}{kind}{m}"): steps for rank in range(degree) for kind in "FB" for m in range(4)}
    assert Counter(e["pid"] for e in slices if e["cat"] == "step") == dict.fromkeys(range(degree), steps)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"compute", "waits", "messages"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(sent) > 0 and starts.keys() == ends.keys()
    for name, start in starts.items():
        sender, receiver = (int(r) for r in name.split("#")[0].split(">"))
        assert (start["pid"], ends[name]["pid"]) == (sender, receiver)
        assert start["ts"] <= ends[name]["ts"]
        assert all(sum(_touches(s, e) for s in slices) == 1 for e in (start, ends[name]))
    _nested([e for e in slices if e["tid"] == 0])


def _touches(piece: dict[str, Any], arrow: dict[str, Any]) -> bool:
    same = all(piece[k] == arrow[k] for k in ("pid", "tid"))
    return bool(same and piece["ts"] <= arrow["ts"] <= piece["ts"] + piece["dur"])


def _nested(slices: list[dict[str, Any]]) -> None:
    """Slices of one thread lie inside of each other or apart, within the file's rounding."""
    for rank in {s["pid"] for s in slices}:
        stack: list[float] = []
        for s in sorted((s for s in slices if s["pid"] == rank), key=lambda s: (s["ts"], -s["dur"])):
            while stack and stack[-1] <= s["ts"] + 1e-2:
                stack.pop()
            assert not stack or s["ts"] + s["dur"] <= stack[-1] + 1e-2
            stack.append(s["ts"] + s["dur"])


def test_ranks_write_parts_when_one_fails(pool: Pool, seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    outcomes = pool.run_fresh(2, models.traced, 2, seed, 3, str(folder), 1, timeout=60)
    assert [o.kind for o in outcomes] == ["error", "error"]
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["trace.rank0.json", "trace.rank1.json"]
    for rank, name in enumerate(names):
        events = json.loads((folder / name).read_text())["traceEvents"]
        assert {e["pid"] for e in events} == {rank}
        assert sum(e.get("cat") == "step" for e in events) >= 2


def test_memory_is_bounded() -> None:
    spans = Spans(True, kept=10)
    for i in range(25):
        with spans.microbatch(i):
            pass
    assert [s.name for s in spans.take()] == [f"microbatch {i}" for i in range(15, 25)]
    assert spans.dropped == 15
    name = next(e for e in rank_events(1, "stage 0", [], 0, spans.dropped) if e["name"] == "process_name")
    assert name["args"]["name"] == "rank 1 (stage 0), 15 earlier spans dropped"


def test_off_keeps_nothing() -> None:
    spans = Spans(False)
    with spans.step(0), spans.microbatch(0), spans.wait("x"), spans.send("y"):
        pass
    assert spans.take() == [] and spans.totals() == (0, 0)


def test_waits_count_as_idle_only_inside_actions() -> None:
    clock = _Ticks()
    spans = Spans(False, clock)  # type: ignore[arg-type]
    spans.counting = True
    with spans.step(0):
        with spans.wait("outside"):
            clock.now += 1000
        with spans.microbatch(0):
            clock.now += 30
            with spans.wait("inside"):
                clock.now += 4
    assert spans.totals() == (34, 4)
    assert spans.totals() == (0, 0)


class _Ticks:
    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        return self.now

    def settle(self) -> Any:
        return int

    def restart(self) -> None:
        pass


def test_device_clock_reads_the_device() -> None:
    device = _Device()
    spans = Spans(True, DeviceClock(device.event, device.synchronize))
    with spans.step(0), spans.microbatch(0):
        device.now += 2.5  # ms of work that the host does not wait for
    step, action = sorted(spans.take(), key=lambda s: s.category == "action")
    assert (action.end - action.start, step.end - step.start) == (2_500_000, 2_500_000)
    assert device.waits == 2  # once to begin, once to end


class _Device:
    """A device whose events are plain times in milliseconds."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def event(self) -> _Event:
        return _Event(self)

    def synchronize(self) -> None:
        self.waits += 1


class _Event:
    def __init__(self, device: _Device) -> None:
        self._device = device

    def record(self) -> None:
        self.time = self._device.now

    def elapsed_time(self, later: _Event) -> float:
        return later.time - self.time


def test_clocks_of_machines_are_aligned() -> None:
    # Two machines of two ranks; the second's clock is 1000 ahead; ranks leave barriers late by up to 40.
    stamps = [[0, 100, 205], [20, 140, 200], [1030, 1100, 1207], [1001, 1110, 1210]]
    assert clock_shifts([0, 0, 7, 7], stamps) == [0, 0, -1001, -1001]
    assert clock_shifts([3], [[]]) == [0]


@pytest.mark.parametrize("category", ["send", "wait"])
def test_arrows_touch_slices_of_no_length(category: str) -> None:
    span = Span("x", category, 5000, 5000, {"flow": "0>1#0"})
    *_, piece, arrow = rank_events(0, "", [span], 0, 0)
    assert _touches(piece, arrow)
