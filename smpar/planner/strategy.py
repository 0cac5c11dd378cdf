"""A strategy: everything that decides how a model runs on a cluster.

tp = 2, dp = 2, pp = 2          stage 0: devices 0 1 | 2 3      replica 0 | replica 1, tensor-parallel pairs
                                stage 1: devices 4 5 | 6 7
"""

from __future__ import annotations

from dataclasses import dataclass

from smpar.schedule import placement


@dataclass(frozen=True)
class Strategy:
    """How to run.

    Attributes:
        tp, pp, dp: degrees of tensor, pipeline and data parallelism.
        microbatch: samples of a microbatch.
        microbatches: of a step, in each replica.
        schedule: a name of `smpar.schedule.make_schedule`.
        virtual_stages: stages on each pipeline rank.
        cuts: the first layer of each of the ``pp * virtual_stages`` stages.
        devices: the cluster's device at each place; place ``t + tp * (d + dp * p)`` has pipeline rank p, replica d and
            tensor-parallel rank t.
        recompute: of each stage, whether its backward first runs its forward again.
        shard_optimizer: whether the replicas divide the optimizer's state among them (arXiv 1910.02054, stage 1).
    """

    tp: int
    pp: int
    dp: int
    microbatch: int
    microbatches: int
    schedule: str
    virtual_stages: int
    cuts: tuple[int, ...]
    devices: tuple[int, ...]
    recompute: tuple[bool, ...] = ()
    shard_optimizer: bool = False

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return self.pp * self.virtual_stages

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.microbatch * self.microbatches

    @property
    def ranks(self) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        return placement(self.schedule, self.pp, self.virtual_stages)

    def place(self, pp: int, dp: int = 0, tp: int = 0) -> int:
        """The device at these coordinates."""
        return self.devices[tp + self.tp * (dp + self.dp * pp)]

    def group(self, pp: int, dp: int) -> tuple[int, ...]:
        """The devices that run a pipeline rank of a replica together."""
        start = self.tp * (dp + self.dp * pp)
        return self.devices[start : start + self.tp]

    def recomputes(self, stage: int) -> bool:
        """Whether that stage recomputes."""
        return bool(self.recompute) and self.recompute[stage]

    def __str__(self) -> str:
        degrees = " x ".join(f"{name} {n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if n > 1)
        virtual = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        more = ", recompute" * any(self.recompute) + ", sharded optimizer" * self.shard_optimizer
        batch = f"{self.microbatches} microbatches of {self.microbatch}"
        return f"{degrees or 'one device'}, {self.schedule}{virtual}, {batch}{more}"
