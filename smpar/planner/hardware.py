"""What no profile and no cluster file says: a handful of constants of links, devices and runtimes.

A `Runtime` is a program that trains: how many bytes it keeps and sends, and what it overlaps. smpar's own is `SMPAR`.
`DEEPSPEED` is the one of AMP's published trials (DeepSpeed's pipeline of 2022 with fp16 and Adam), by which the cost
model is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class Runtime:
    """How a runtime holds its state, and what waits for what.

    Attributes:
        weight, gradient, optimizer: bytes that it keeps per parameter; the last is what sharding divides.
        message: bytes of an element that crosses a boundary, forward or backward.
        reduced: bytes of a parameter's gradient in the reduction over replicas.
        tied: bytes of a tied parameter's gradient in the sum over its stages.
        blocking: the sender of a message computes nothing until it has gone out.
        step: bytes that the optimizer's step reads and writes per parameter.
        message_seconds: from one rank's asking to the message's first byte, beyond the link's own latency.
        fixed: seconds of each step that nothing else explains (its Python, checks among all ranks).
        nic: the part of a network card's stated rate that is reached between nodes.
        intra: the same of links inside a node.
        reserve: bytes of a device that no model can use (context, communication buffers, fragmentation).
        schedules: that it knows and that are worth a try.
        tensor, recomputes, shards: whether it can do tensor parallelism, run a stage's forward again in its backward,
            and divide the optimizer's state among replicas.
    """

    weight: float
    gradient: float
    optimizer: float
    message: float
    reduced: float
    tied: float
    blocking: bool
    step: float
    message_seconds: float
    fixed: float
    nic: float
    intra: float
    reserve: float
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "zb", "zbv")
    tensor: bool = True
    recomputes: bool = True
    shards: bool = True

    @property
    def state(self) -> float:
        """Bytes per parameter."""
        return self.weight + self.gradient + self.optimizer


SMPAR = Runtime(
    weight=4, gradient=4, optimizer=8, message=4, reduced=4, tied=4, blocking=False, step=28, message_seconds=1e-4,
    fixed=1e-3, nic=0.9, intra=0.8, reserve=0.0,
)  # fmt: skip
DEEPSPEED = Runtime(
    weight=2, gradient=2, optimizer=14, message=2, reduced=4, tied=2, blocking=True, step=60, message_seconds=1e-3,
    fixed=0.02, nic=0.95, intra=0.8, reserve=0.0, schedules=("1f1b",), shards=False,
)  # fmt: skip
