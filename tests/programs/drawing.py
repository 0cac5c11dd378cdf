"""Draws programs with hypothesis, so that one that fails shrinks: to fewer lines, later operands, fewer stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.programs.programs import KINDS, Damp, Fork, Gate, Join, Op, Program, Unit

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[T]], T]

LINES = 18
VALUES = (0.5, 0.8, 1.2, 1.5)  # 1 would make a write unseen
GLUE = ("scale", "scale", "add", "add", "mul", "shift", "weigh", "stack", "cat", "detach")
OF_TWO = ("add", "mul", "stack", "cat")
WRITES = ("mul_", "add_", "fill_", "flatten_", "quiet_")
RARELY = st.integers(0, 7).map(lambda n: n == 7)


@st.composite
def programs(draw: Draw[Any], stages: int) -> Program:
    """A program over so many stages."""
    return _Writer(draw, stages).program()


class _Writer:
    """Draws a program line by line, so that torch allows it in one process.

    A tensor may be written in place as long as no operation has kept it for its backward: these are ``soft``, with
    the family that each shares memory with, and the kin in it that share its gradient, too: not so an alias. What
    stands first in a choice is what a failing program shrinks to.
    """

    def __init__(self, draw: Draw[Any], stages: int) -> None:
        self.draw = draw
        unit = st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, stages - 1), RARELY)
        drawn = draw(st.lists(unit, min_size=2, max_size=8))
        # hypothesis likes to repeat what it drew: of equal draws, too, units lie on several stages, and take turns
        self.units = [Unit(kind, (home + i) % stages, frozen) for i, (kind, home, frozen) in enumerate(drawn)]
        self.ops: list[Op] = []
        self.full = list(range(draw(st.integers(1, 2))))  # registers [N, WIDTH]
        self.inputs = len(self.full)
        self.halves: list[int] = []  # registers [N, 2]
        self.family: dict[int, int] = {}  # soft register -> the first of its family
        self.kin: dict[int, int] = {}  # soft register -> the first of its kin
        self.live: set[int] = set()  # those with a gradient
        self.staged: set[int] = set()  # those made of some unit's result; others are plain, the same on every rank
        self.next = self.inputs

    def program(self) -> Program:
        self.call()
        lines = (*[None] * 6, *[self.call] * 4, self.glue, self.glue, self.view, self.alias, self.widen,
                 self.write, self.write, self.loss, self.loss)  # fmt: skip
        for _ in range(LINES):
            write = self.draw(st.sampled_from(lines))
            if write is not None:
                write()
        if not any(op.name == "loss" for op in self.ops):
            (made,) = self.fresh()
            self.ops += [Op("shift", (self.full[-1],), (made,)), Op("loss", (made,), value=1.0)]
            self.full.append(made)
        returned = self.draw(st.lists(self.latest(self.full), min_size=1, max_size=3, unique=True))
        return Program(
            self.draw(st.integers(0, 2**31)), tuple(self.units), self.inputs, tuple(self.ops), tuple(returned)
        )

    # -- choices

    @staticmethod
    def latest(registers: list[int]) -> st.SearchStrategy[int]:
        """One of them, the latest first."""
        return st.sampled_from(registers[::-1])

    def pick(self) -> int:
        return int(self.draw(self.latest(self.full[-4:]) | self.latest(self.full)))

    def value(self) -> float:
        return float(self.draw(st.sampled_from(VALUES)))

    def fresh(self, count: int = 1) -> tuple[int, ...]:
        self.next += count
        return tuple(range(self.next - count, self.next))

    def keep(self, *registers: int) -> None:
        """An operation keeps these for its backward: no more writes into their memory."""
        families = {self.family[i] for i in registers if i in self.family}
        self.family = {i: f for i, f in self.family.items() if f not in families}

    # -- lines

    def call(self) -> None:
        before = sum(op.unit >= 0 for op in self.ops)
        number = (before + self.draw(st.integers(0, len(self.units) - 1))) % len(self.units)
        unit = self.units[number]
        kind = KINDS[unit.kind]
        if kind is Damp and not self.staged:
            return self.operate("shift", self.pick())  # an input is not written into
        if kind is Damp:
            used: tuple[int, ...] = (self.draw(self.latest(self.soft())),)
        else:
            used = tuple(self.pick() for _ in range(2 if kind is Join else 1))
            self.keep(*used)
        made = self.fresh(3 if kind is Fork else 1)
        name = "look" if self.draw(RARELY) else "call"
        self.ops.append(Op(name, used, made, number))
        self.full += made
        self.staged |= set(made)
        if name == "call" and (any(i in self.live for i in used) or (kind not in (Gate, Damp) and not unit.frozen)):
            self.live |= set(made[:2])
        if kind is Fork and name == "call":
            self.join(made[0], made[0])
            self.join(made[2], made[0], apart=True)

    def glue(self) -> None:
        name = self.draw(st.sampled_from(GLUE))
        self.operate(name, *(self.pick() for _ in range(2 if name in OF_TWO else 1)))

    def operate(self, name: str, *used: int) -> None:
        if name in ("mul", "weigh"):
            self.keep(*used)
        (made,) = self.fresh()
        self.ops.append(Op(name, used, (made,), value=self.value() if name == "scale" else 0.0))
        self.full.append(made)
        if name in ("shift", "weigh") or any(i in self.staged for i in used):
            self.staged.add(made)
            if name in ("add", "scale", "stack"):
                self.join(made, made)
        if name in ("shift", "weigh") or (name != "detach" and any(i in self.live for i in used)):
            self.live.add(made)

    def join(self, made: int, source: int, apart: bool = False) -> None:
        """A new register has the memory of another, or its own."""
        self.family[made] = self.family.get(source, source)
        self.kin[made] = made if apart else self.kin.get(source, source)

    def soft(self) -> list[int]:
        """What may be written; there is something, if only a new result."""
        if not any(i in self.family for i in self.full):
            self.operate("scale", [i for i in self.full if i in self.staged][-1])
        return [i for i in self.full if i in self.family]

    def view(self) -> None:
        source, (made,) = self.draw(self.latest(self.soft())), self.fresh()
        self.ops.append(Op("part", (source,), (made,)))
        self.halves.append(made)
        self.join(made, source)
        self.staged.add(made)
        if source in self.live:
            self.live.add(made)

    def alias(self) -> None:
        halves = [i for i in self.halves if i in self.family]
        source, (made,) = self.draw(self.latest(self.soft() + halves)), self.fresh()
        self.ops.append(Op("alias", (source,), (made,)))
        (self.halves if source in halves else self.full).append(made)
        self.join(made, source, apart=True)
        self.staged.add(made)

    def widen(self) -> None:
        if not self.halves:
            self.view()
        source, (made,) = self.draw(self.latest(self.halves)), self.fresh()
        self.ops.append(Op("whole", (source,), (made,)))
        self.full.append(made)
        self.staged.add(made)
        if source in self.live:
            self.live.add(made)

    def write(self) -> None:
        soft, halves = self.soft(), [i for i in self.halves if i in self.family]
        if halves and self.draw(st.booleans()):
            target, name = self.draw(self.latest(halves)), "mul_"
        else:
            target, name = self.draw(self.latest(soft)), self.draw(st.sampled_from(WRITES))
        used = (target, self.pick()) if name == "add_" else (target,)
        if name == "add_" and self.family.get(used[1], -1) == self.family[target]:
            return  # memory that overlaps itself
        kin = [i for i in self.family if self.kin[i] == self.kin[target]]
        self.ops.append(Op(name, used, value=self.value()))
        if any(i in self.live for i in used):  # all of its kin have its gradient from now on
            self.live.update(kin)

    def loss(self) -> None:
        live = [i for i in self.full if i in self.live]
        if live:
            used = self.draw(self.latest(live[-4:]))
            self.keep(used)
            self.ops.append(Op("loss", (used,), value=self.value()))
