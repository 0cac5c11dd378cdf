"""Who this process is: ranks, sizes and groups of the current world (SMP's common API).

For X in pp, tp, rdp, mp, dp: ``X_rank()`` is this rank's place in its group, ``X_size()`` the group's size,
``get_X_group()`` the group's global ranks, ``get_X_process_group()`` its torch process group.

    pp   the stages of one replica and shard        mp = pp x tp    one replica
    tp   the shards of one stage and replica        dp = tp x rdp   all ranks that hold one stage
    rdp  the replicas of one shard

All raise NotInitialized before ``smpar.init``.
"""

from __future__ import annotations

import torch.distributed as dist

from smpar.comm.world import current, is_initialized

__all__ = [
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "instance_id",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]


def rank() -> int:
    """Global rank of this process."""
    return current().rank


def size() -> int:
    """Number of processes."""
    return current().size


def local_rank() -> int:
    """Rank of this process on its machine."""
    return current().local_rank


def local_size() -> int:
    """Number of this job's processes on this machine."""
    return current().local_size


def instance_id() -> int:
    """Number of this machine among those of the job."""
    return current().instance_id


def get_world_process_group() -> dist.ProcessGroup:
    """The process group of all ranks."""
    return current().process_group("world")


def pp_rank() -> int:
    """Place of this rank in its pp group."""
    return current().axis_rank("pp")


def pp_size() -> int:
    """Number of ranks in this rank's pp group."""
    return current().axis_size("pp")


def get_pp_group() -> list[int]:
    """Global ranks of this rank's pp group, ascending."""
    return current().group("pp")


def get_pp_process_group() -> dist.ProcessGroup:
    """Process group of this rank's pp group."""
    return current().process_group("pp")


def tp_rank() -> int:
    """Place of this rank in its tp group."""
    return current().axis_rank("tp")


def tp_size() -> int:
    """Number of ranks in this rank's tp group."""
    return current().axis_size("tp")


def get_tp_group() -> list[int]:
    """Global ranks of this rank's tp group, ascending."""
    return current().group("tp")


def get_tp_process_group() -> dist.ProcessGroup:
    """Process group of this rank's tp group."""
    return current().process_group("tp")


def rdp_rank() -> int:
    """Place of this rank in its rdp group."""
    return current().axis_rank("rdp")


def rdp_size() -> int:
    """Number of ranks in this rank's rdp group."""
    return current().axis_size("rdp")


def get_rdp_group() -> list[int]:
    """Global ranks of this rank's rdp group, ascending."""
    return current().group("rdp")


def get_rdp_process_group() -> dist.ProcessGroup:
    """Process group of this rank's rdp group."""
    return current().process_group("rdp")


def mp_rank() -> int:
    """Place of this rank in its mp group."""
    return current().axis_rank("mp")


def mp_size() -> int:
    """Number of ranks in this rank's mp group."""
    return current().axis_size("mp")


def get_mp_group() -> list[int]:
    """Global ranks of this rank's mp group, ascending."""
    return current().group("mp")


def get_mp_process_group() -> dist.ProcessGroup:
    """Process group of this rank's mp group."""
    return current().process_group("mp")


def dp_rank() -> int:
    """Place of this rank in its dp group."""
    return current().axis_rank("dp")


def dp_size() -> int:
    """Number of ranks in this rank's dp group."""
    return current().axis_size("dp")


def get_dp_group() -> list[int]:
    """Global ranks of this rank's dp group, ascending."""
    return current().group("dp")


def get_dp_process_group() -> dist.ProcessGroup:
    """Process group of this rank's dp group."""
    return current().process_group("dp")
