"""A schedule is data: for each rank the list of its actions, printable and readable back.

    schedule 1f1b
    rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2

``2F0`` is segment 2, forward, microbatch 0. A backward ``2B0`` may be split in two: ``2I0`` gives the gradients of the
segment's inputs, which other segments wait for, ``2W0`` later those of its weights. Messages, which
`smpar.schedule.lower` adds, also name their flow and the other end: ``2SA0:5>1`` sends, after segment 2's forward of
microbatch 0, the activation of flow 5 to rank 1, where ``3RA0:5<0`` receives it for segment 3.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from smpar.errors import ScheduleError


class Kind(Enum):
    """What an action does. The value is its text in a printed schedule."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"

    @property
    def is_message(self) -> bool:
        """Whether it moves a tensor rather than computes one."""
        return len(self.value) == 2

    @property
    def role(self) -> Kind:
        """The computation that it stands for among those that wait for each other: I does what B does for others."""
        return Kind.B if self is Kind.I else self

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's timetable.

    Attributes:
        kind: forward, backward, backward of inputs, backward of weights, or one end of a message.
        segment: index of the segment that computes, or for which the message is sent or received.
        microbatch: index of the microbatch.
        flow: for a message, the index of its flow in the program; else -1.
        peer: for a message, the rank at the other end; else -1.
    """

    kind: Kind
    segment: int
    microbatch: int
    flow: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.segment}{self.kind.value}{self.microbatch}"
        if not self.kind.is_message:
            return text
        return f"{text}:{self.flow}{'>' if self.kind.is_send else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` printed.

        Raises:
            ScheduleError: the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match:
            segment, kind, microbatch, flow, _, peer = match.groups()
            action = cls(Kind(kind), int(segment), int(microbatch), int(flow or -1), int(peer or -1))
            if str(action) == text:
                return action
        raise ScheduleError(
            "an action is written SEGMENT KIND MICROBATCH, and a message also :FLOW>RANK or :FLOW<RANK",
            repr(text),
            "write for example 2F0, 2B0, 2SA0:5>1 or 3RA0:5<0, numbers without leading zeros",
        )


_ACTION = re.compile(r"(\d+)(F|B|I|W|SA|RA|SG|RG)(\d+)(?::(\d+)([<>])(\d+))?")


@dataclass(frozen=True)
class Schedule:
    """Rank -> the actions it performs, in order.

    Attributes:
        name: the order's name, one line of text.
        ranks: one tuple of actions per rank; empty for a rank with nothing to do.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.name != self.name.strip() or len(self.name.splitlines()) > 1:
            raise ScheduleError(
                "a schedule's name is one line without blanks around it", repr(self.name), "shorten the name"
            )

    def __str__(self) -> str:
        return self.table()

    def table(self, marks: Collection[tuple[int, int]] = (), around: int | None = None) -> str:
        """The schedule as text, one line per rank, columns aligned.

        Args:
            marks: (rank, position) pairs to show as ``>2F0<``. A position one past a rank's end shows ``>end<``.
            around: with marks, show only so many columns before the first and after the last mark.
        """
        width = max((len(actions) for actions in self.ranks), default=0)
        first, last = 0, width + 1
        if around is not None and marks:
            first = max(0, min(position for _, position in marks) - around)
            last = max(position for _, position in marks) + around + 1
        rows = []
        for rank, actions in enumerate(self.ranks):
            cells = [str(action) for action in actions[first:last]]
            for position in sorted(position for r, position in marks if r == rank):
                if position == len(actions):
                    cells.append("end")
                cells[position - first] = f">{cells[position - first]}<"
            rows.append(cells)
        widths = [max(len(row[c]) for row in rows if c < len(row)) for c in range(max(map(len, rows), default=0))]
        digits = len(str(len(self.ranks) - 1))
        before, after = ("... " if first else ""), (" ..." if last < width else "")
        lines = [f"schedule {self.name}".rstrip()]
        for rank, row in enumerate(rows):
            text = " ".join(cell.ljust(widths[c]) for c, cell in enumerate(row)).rstrip()
            more = after if len(self.ranks[rank]) > last else ""
            lines.append(f"rank {rank:>{digits}} | {before}{text}{more}".rstrip())
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what `str` printed.

        Raises:
            ScheduleError: a line or an action cannot be read, or ranks are not 0, 1, 2, ... in order.
        """
        head, *rows = [line for line in text.strip().splitlines() if line.strip()] or [""]
        if head.split()[:1] != ["schedule"]:
            raise ScheduleError("a schedule's table starts with its name", repr(head), "write `schedule NAME` first")
        ranks = []
        for number, row in enumerate(rows):
            label, bar, cells = row.partition("|")
            if label.split() != ["rank", str(number)] or not bar:
                raise ScheduleError(
                    "each line of a schedule's table is one rank, in order", repr(row), f"write `rank {number} | ...`"
                )
            ranks.append(tuple(Action.parse(cell) for cell in cells.split()))
        return cls(head.strip()[len("schedule") :].strip(), tuple(ranks))

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """All (rank, position, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                yield rank, position, action

    def in_flight(self) -> tuple[tuple[int, ...], ...]:
        """For each rank and position: the microbatches begun and not ended there, those of the action itself included.

        A microbatch is in flight on a rank from its first action there to its last, a W too.
        """
        result = []
        for actions in self.ranks:
            last = {action.microbatch: position for position, action in enumerate(actions)}
            now: set[int] = set()
            counts = []
            for position, action in enumerate(actions):
                now.add(action.microbatch)
                counts.append(len(now))
                if last[action.microbatch] == position:
                    now.discard(action.microbatch)
            result.append(tuple(counts))
        return tuple(result)

    def peak_in_flight(self) -> tuple[int, ...]:
        """For each rank, the most microbatches that are in flight there at once; it bounds activation memory."""
        return tuple(max(counts, default=0) for counts in self.in_flight())
