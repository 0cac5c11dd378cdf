"""Programs: graphs of small modules and glue, each a piece of data, printed as the code it stands for.

r0, r1 = inputs
r2 = u3(r0)                     unit 3, on a stage of its own choice
r3 = r2 * 1.0
r4 = r3[:, 1:3]
r4.mul_(0.5)                    in place, through a view
r5 = u3(r2 + r3).detach()       unit 3 again
backward(r5.square().mean())
"""

from __future__ import annotations

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


class Damp(nn.Module):
    """No parameters; writes into its input, which glue may see."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.9) * 0.5


KINDS: tuple[type[nn.Module], ...] = (Plain, Plain, NoBias, Join, Fork, Gate, Damp)


class Op(NamedTuple):
    """One line of a program. ``made`` registers come out, ``used`` go in."""

    name: str
    used: tuple[int, ...]
    made: tuple[int, ...] = ()
    unit: int = -1
    value: float = 0.0


class Unit(NamedTuple):
    """A module of a program.

    Attributes:
        kind: index into `KINDS`.
        home: its stage.
        frozen: whether its parameters need no gradient.
    """

    kind: int
    home: int
    frozen: bool = False


@dataclass(frozen=True, repr=False)
class Program:
    """A program: units with their stages, lines of code, the registers that it returns.

    Attributes:
        seed: of weights and data.
        inputs: number of tensors that go in.
    """

    seed: int
    units: tuple[Unit, ...]
    inputs: int
    ops: tuple[Op, ...]
    returned: tuple[int, ...]

    def __repr__(self) -> str:
        lines = [f"program, weights of seed {self.seed}"]
        for i, unit in enumerate(self.units):
            lines.append(f"  u{i}: {KINDS[unit.kind].__name__} on stage {unit.home}{', frozen' if unit.frozen else ''}")
        lines.append(f"  {', '.join(f'r{i}' for i in range(self.inputs))} = inputs")
        for op in self.ops:
            called = f"u{op.unit}" if op.unit >= 0 else op.name
            left = ", ".join(f"r{i}" for i in op.made)
            args = [f"r{i}" for i in op.used] + ([str(op.value)] if op.value else [])
            note = "    without gradient" if op.name == "look" else ""
            lines.append(f"  {left + ' = ' if left else ''}{called}({', '.join(args)}){note}")
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
    "alias": lambda m, v, a: a.detach(),
    "whole": lambda m, v, a: F.pad(a, (1, 1)),
    "add_": lambda m, v, a, b: a.add_(b, alpha=v),
    "mul_": lambda m, v, a: a.mul_(v),
    "fill_": lambda m, v, a: a[:, 0].fill_(v),
    "flatten_": lambda m, v, a: (a.view(-1) if a.is_contiguous() else a.t())[::3].mul_(v),
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
        self.units = nn.ModuleList(KINDS[unit.kind]() for unit in program.units)
        self.shift, self.weight = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        for unit, module in zip(program.units, self.units, strict=True):
            if unit.frozen:
                module.requires_grad_(False)

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
                else:
                    for register in registers.values():
                        _ = register.grad_fn  # until it is asked for it, torch lets nobody write into a view
        return losses, [registers[i] for i in self.program.returned]

    @staticmethod
    def _put(registers: dict[int, Any], op: Op, result: Any) -> None:
        values = [result] if isinstance(result, Tensor) else list(result.values())
        registers.update(zip(op.made, values, strict=True))


def data(program: Program, step: int, samples: int) -> tuple[Tensor, ...]:
    """A step's inputs, ``[samples, WIDTH]`` each, float64."""
    generator = torch.Generator().manual_seed(program.seed + step)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(program.inputs))


def build(program: Program) -> Interpreter:
    """The program's module, with random weights."""
    torch.manual_seed(program.seed)
    return Interpreter(program).double()
