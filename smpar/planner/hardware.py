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
        launches: seconds of launching the optimizer's kernels, for each layer of a rank.
        message_seconds: from one rank's asking to the message's first byte, beyond the link's own latency.
        action: seconds of a forward or backward of one stage that no kernel takes (Python, looking up what is due).
        unit: seconds of Python for each layer of the model in each forward, on every rank: all run the model's glue.
        fixed: seconds of each step that nothing else explains (its Python, checks among all ranks).
        nic: the part of a network card's stated rate that is reached between nodes.
        nic_most: bytes per second that one card moves at most, however fast it is said to be.
        intra: the part of a stated rate that links inside a node reach.
        memory: the part of a device's stated memory bandwidth that its optimizer's step reaches.
        reserve: bytes of a device that no model can use (context, communication buffers, fragmentation).
        averages_whole: whether it averages what tensor parallelism does not divide over the ranks of a tensor-parallel
            group, too.
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
    action: float = 0.0
    unit: float = 0.0
    launches: float = 0.0
    nic_most: float = float("inf")
    memory: float = 0.85
    averages_whole: bool = False
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "zb", "zbv")
    tensor: bool = True
    recomputes: bool = True
    shards: bool = True

    @property
    def state(self) -> float:
        """Bytes per parameter."""
        return self.weight + self.gradient + self.optimizer


# Measured on CPUs (`scripts/bench host` shows where it goes): host seconds of an action, of a layer in a forward and in
# the optimizer's step (AdamW, some tensors each), and of a step (ranks compare what they are about to run, barriers).
SMPAR = Runtime(
    weight=4, gradient=4, optimizer=8, message=4, reduced=4, tied=4, blocking=False, step=28, message_seconds=1e-4,
    action=2.5e-4, unit=4.5e-5, launches=1e-4, fixed=1.5e-3, nic=0.9, intra=0.8, reserve=GIB,
    averages_whole=True,
)  # fmt: skip
# Counted: half-precision weight 2 and gradient 2; fp32 copy and Adam's two moments 12, flat buffers of the reduction in
# half and full precision 6; step: flatten and cast, norm, unscale, Adam (reads 16, writes 12), copy back.
# Fitted to AMP's trials: 0.75 inside a node (PCIe through the host's memory), 34 Gbit/s of a 50 Gbit/s card by NCCL
# over TCP (copies by the CPU), 2 ms of each message (instruction, meta data, start of NCCL). 0.97 is what TCP/IP
# headers leave. The reserve is CUDA's context, NCCL's and cuBLAS's buffers, and fragments.
DEEPSPEED = Runtime(
    weight=2, gradient=2, optimizer=18, message=2, reduced=4, tied=2, blocking=False, step=60, message_seconds=2e-3,
    fixed=0.0, nic=0.97, nic_most=4.2e9, intra=0.75, reserve=GIB, schedules=("1f1b",), shards=False,
)  # fmt: skip


@dataclass(frozen=True)
class Reached:
    """What kernels reach of a device's rates, for times that are counted and not measured (a roofline).

    Attributes:
        flops, bytes: the part of the stated FLOP/s that large products reach, and of the bytes/s of everything else.
        launch: seconds of each operator beyond that.
    """

    flops: float
    bytes: float
    launch: float


DATA_SHEET = Reached(0.48, 0.74, 4e-6)
"""Of rates in a data sheet: an A100's 312 TFLOP/s and 2.04 TB/s give 150 TFLOP/s and 1.5 TB/s in practice."""
PROBED = Reached(0.85, 0.9, 4e-6)
"""Of rates that `smpar probe` has measured with large products and copies."""


@dataclass(frozen=True)
class Kernels:
    """How a model's forward time for one sample divides, and what follows for microbatches and for the backward.

    A profile of one microbatch size cannot tell what of it grows with the size. A roofline can: arithmetic and memory
    traffic take the device so long; the rest is the host's (Python, launches), whatever the size. With profiles of two
    sizes (`smpar profile`) nothing of this is needed.

    Attributes:
        flops: the part of a data sheet's half-precision peak that products of matrices about 1000 wide reach.
        memory: the part of the stated memory bandwidth that kernels reach which only copy.
        lasting: time under a lasting load / time in a short profile, of cards that their power limit slows down. The T4
            (70 W) shows it inside AMP's profile: equal layers take 4.90 ms at first, 5.83 ms at the end.
        back_flops: arithmetic of a backward / of its forward: two products for one.
        back_bytes: memory traffic: elementwise backwards read two and write one, forwards read one and write one.
        back_host: host's time: twice the kernels, launched from C++ and not from Python.
        logit_traffic: bytes of memory traffic per logit in a cross-entropy of full precision, forward and backward:
            cast, maximum, subtract, exponential, sum, divide, backward, cast; about ten passes of 4.
        logit_bytes: bytes kept per logit: half precision 2, full 4, softmax 4, gradient 4.
    """

    flops: float = 0.5
    memory: float = 0.85
    lasting: float = 1.19
    back_flops: float = 2.0
    back_bytes: float = 1.5
    back_host: float = 1.5
    logit_traffic: float = 40.0
    logit_bytes: float = 14.0
