"""Random programs: a number gives a graph of small modules and glue, printed as the code it stands for.

r0, r1 = inputs
r2 = u3(r0)                     unit 3, on a stage of its own choice
r3 = r2 * 1.0
r4 = r3[:, 1:3]
r4.mul_(0.5)                    in place, through a view
r5 = u3(r2 + r3).detach()       unit 3 again
backward(r5.square().mean())
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4


class Plain(nn.Module):
    """One tensor in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + 0.5 * x


class NoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x) + x)


class Join(nn.Module):
    """Two tensors in."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.left(x) + self.right(y))


class Fork(nn.Module):
    """A dict of two tensors out, one of them without gradient; the other may be a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        both = self.linear(x)
        return {"a": both[:, :WIDTH], "b": torch.sigmoid(both[:, WIDTH:]), "c": both[:, :WIDTH].detach()}


class Gate(nn.Module):
    """No parameters; writes into its input where that is allowed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * 1.0, inplace=True) + 0.1 * x


KINDS: tuple[type[nn.Module], ...] = (Plain, Plain, NoBias, Join, Fork, Gate)


class Op(NamedTuple):
    """One line of a program. ``made`` registers come out, ``used`` go in."""

    name: str
    used: tuple[int, ...]
    made: tuple[int, ...] = ()
    unit: int = -1
    value: float = 0.0


@dataclass(frozen=True)
class Program:
    """A program: units with their stages, lines of code, the registers that it returns.

    Attributes:
        kinds, homes, frozen: of each unit.
        inputs: number of tensors that go in.
    """

    number: int
    kinds: tuple[int, ...]
    homes: tuple[int, ...]
    frozen: frozenset[int]
    inputs: int
    ops: tuple[Op, ...]
    returned: tuple[int, ...]

    def __str__(self) -> str:
        units = ", ".join(f"u{i} {KINDS[k].__name__}@{s}" for i, (k, s) in enumerate(zip(self.kinds, self.homes,
                                                                                   strict=True)))  # fmt: skip
        lines = [f"program {self.number}: {units}; frozen {sorted(self.frozen)}"]
        for op in self.ops:
            called = f"u{op.unit}" if op.unit >= 0 else op.name
            left = ", ".join(f"r{i}" for i in op.made)
            lines.append(f"  {left + ' = ' if left else ''}{called}({', '.join(f'r{i}' for i in op.used)}; {op.value})")
        return "\n".join([*lines, f"  return {', '.join(f'r{i}' for i in self.returned)}"])


GLUE: dict[str, Callable[..., Any]] = {
    "add": lambda m, v, a, b: a + b,
    "mul": lambda m, v, a, b: a * torch.sigmoid(b),
    "scale": lambda m, v, a: a * v,
    "shift": lambda m, v, a: a + m.shift,
    "weigh": lambda m, v, a: F.linear(a, m.weight),
    "stack": lambda m, v, a, b: torch.stack([a, b]).mean(0),
    "cat": lambda m, v, a, b: torch.cat([a[:, 2:], b[:, :2]], dim=1),
    "detach": lambda m, v, a: a.detach() + 0.5,
    "part": lambda m, v, a: a[:, 1:3],
    "whole": lambda m, v, a: F.pad(a, (1, 1)),
    "add_": lambda m, v, a, b: a.add_(b, alpha=v),
    "mul_": lambda m, v, a: a.mul_(v),
    "fill_": lambda m, v, a: a[:, 0].fill_(v),
    "flatten_": lambda m, v, a: a.view(-1)[::3].mul_(v),
    "quiet_": lambda m, v, a: _quietly(a, v),
}


def _quietly(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor[:, -1] *= value


class Interpreter(nn.Module):
    """Runs a program as the forward of a module; its losses come out beside what it returns."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.units = nn.ModuleList(KINDS[k]() for k in program.kinds)
        self.shift, self.weight = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        for i in program.frozen:
            self.units[i].requires_grad_(False)

    def forward(self, *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        registers: dict[int, Any] = dict(enumerate(inputs))
        losses: list[Tensor] = []
        for op in self.program.ops:
            args = [registers[i] for i in op.used]
            if op.name == "loss":
                losses.append(args[0].square().mean() * op.value)
            elif op.name == "call":
                self._put(registers, op, self.units[op.unit](*args))
            elif op.name == "look":
                with torch.no_grad():
                    self._put(registers, op, self.units[op.unit](*args))
            else:
                result = GLUE[op.name](self, op.value, *args)
                if op.made:
                    registers[op.made[0]] = result
        return losses, [registers[i] for i in self.program.returned]

    @staticmethod
    def _put(registers: dict[int, Any], op: Op, result: Any) -> None:
        values = [result] if isinstance(result, Tensor) else list(result.values())
        registers.update(zip(op.made, values, strict=True))


class _Writer:
    """Draws a program line by line, so that torch allows it in one process.

    A tensor may be written in place as long as no operation has kept it for its backward: these are ``soft``, with
    the family of views that each belongs to.
    """

    def __init__(self, number: int, stages: int) -> None:
        self.random = random.Random(number)
        r = self.random
        self.kinds = tuple(r.randrange(len(KINDS)) for _ in range(r.randint(3, 7)))
        self.homes = tuple(r.randrange(stages) for _ in self.kinds)
        self.frozen = frozenset(i for i in range(len(self.kinds)) if r.random() < 0.15)
        self.ops: list[Op] = []
        self.full = list(range(r.randint(1, 2)))  # registers [N, WIDTH]
        self.inputs = len(self.full)
        self.halves: list[int] = []  # registers [N, 2]
        self.family: dict[int, int] = {}  # soft register -> the first of its family
        self.live: set[int] = set()  # those with a gradient
        self.staged: set[int] = set()  # those made of some unit's result; others are plain, the same on every rank
        self.next = self.inputs

    def fresh(self, count: int = 1) -> tuple[int, ...]:
        self.next += count
        return tuple(range(self.next - count, self.next))

    def keep(self, *registers: int) -> None:
        """An operation keeps these for its backward: no more writes into their memory."""
        families = {self.family[i] for i in registers if i in self.family}
        self.family = {i: f for i, f in self.family.items() if f not in families}

    def pick(self) -> int:
        recent = self.full[-4:]
        return self.random.choice(recent if self.random.random() < 0.7 else self.full)

    def call(self) -> None:
        r = self.random
        unit = r.randrange(len(self.kinds))
        kind = KINDS[self.kinds[unit]]
        used = tuple(self.pick() for _ in range(2 if kind is Join else 1))
        self.keep(*used)
        made = self.fresh(3 if kind is Fork else 1)
        name = "look" if r.random() < 0.1 else "call"
        self.ops.append(Op(name, used, made, unit))
        self.full += made
        self.staged |= set(made)
        if name == "call" and (any(i in self.live for i in used) or (kind is not Gate and unit not in self.frozen)):
            self.live |= set(made[:2])

    def glue(self) -> None:
        name = self.random.choice(["add", "add", "mul", "scale", "scale", "shift", "weigh", "stack", "cat", "detach"])
        used = tuple(self.pick() for _ in range(2 if name in ("add", "mul", "stack", "cat") else 1))
        if name in ("mul", "weigh"):
            self.keep(*used)
        (made,) = self.fresh()
        self.ops.append(Op(name, used, (made,), value=round(self.random.uniform(0.5, 1.5), 2)))
        self.full.append(made)
        if name in ("shift", "weigh") or any(i in self.staged for i in used):
            self.staged.add(made)
            if name in ("add", "scale", "stack"):
                self.family[made] = made
        if name in ("shift", "weigh") or (name != "detach" and any(i in self.live for i in used)):
            self.live.add(made)

    def view(self) -> None:
        soft = [i for i in self.full if i in self.family]
        if not soft:
            return
        source = self.random.choice(soft)
        (made,) = self.fresh()
        self.ops.append(Op("part", (source,), (made,)))
        self.halves.append(made)
        self.family[made] = self.family[source]
        self.staged.add(made)
        if source in self.live:
            self.live.add(made)

    def widen(self) -> None:
        if not self.halves:
            return
        source, (made,) = self.random.choice(self.halves), self.fresh()
        self.ops.append(Op("whole", (source,), (made,)))
        self.full.append(made)
        self.staged.add(made)
        if source in self.live:
            self.live.add(made)

    def write(self) -> None:
        soft = [i for i in self.full if i in self.family]
        halves = [i for i in self.halves if i in self.family]
        if not soft:
            return
        value = round(self.random.uniform(0.5, 1.5), 2)
        if halves and self.random.random() < 0.5:
            target, name = self.random.choice(halves), "mul_"
        else:
            target, name = self.random.choice(soft), self.random.choice(["add_", "mul_", "fill_", "flatten_", "quiet_"])
        used = (target, self.pick()) if name == "add_" else (target,)
        if name == "add_" and self.family.get(used[1], -1) == self.family[target]:
            return  # memory that overlaps itself
        self.ops.append(Op(name, used, value=value))
        if any(i in self.live for i in used):  # all of the family has its gradient from now on
            self.live |= {i for i, f in self.family.items() if f == self.family[target]}

    def loss(self) -> None:
        live = [i for i in self.full if i in self.live]
        if live:
            used = self.random.choice(live[-4:])
            self.keep(used)
            self.ops.append(Op("loss", (used,), value=round(self.random.uniform(0.5, 1.5), 2)))

    def program(self, number: int) -> Program:
        r = self.random
        self.call()
        for _ in range(r.randint(6, 22)):
            r.choice([self.call, self.call, self.call, self.glue, self.glue, self.view, self.widen, self.write,
                      self.loss])()  # fmt: skip
        if not any(op.name == "loss" for op in self.ops):
            (made,) = self.fresh()
            self.ops += [Op("shift", (self.full[-1],), (made,)), Op("loss", (made,), value=1.0)]
            self.full.append(made)
        returned = tuple(r.sample(self.full, min(len(self.full), r.randint(1, 3))))
        return Program(number, self.kinds, self.homes, self.frozen, self.inputs, tuple(self.ops), returned)


def draw(number: int, stages: int) -> Program:
    """The program of that number, over so many stages."""
    return _Writer(number, stages).program(number)


def data(program: Program, step: int, samples: int) -> tuple[Tensor, ...]:
    """A step's inputs, ``[samples, WIDTH]`` each, float64."""
    generator = torch.Generator().manual_seed(program.number % 2**31 + step)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(program.inputs))


def build(program: Program) -> Interpreter:
    """The program's module, with random weights that its number gives."""
    torch.manual_seed(program.number % 2**31)
    return Interpreter(program).double()
