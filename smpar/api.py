"""All public names; ``import smpar`` finds them here when they are first used."""

from __future__ import annotations

from smpar import amp, nn
from smpar.advisor import plan
from smpar.comm.messages import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smpar.describe.page import plans_page
from smpar.describe.plans import plans_text
from smpar.describe.report import metrics, report, timetable
from smpar.errors import SmparError
from smpar.model import DistributedModel, set_partition
from smpar.nn.marks import model_creation, set_tensor_parallelism, tensor_parallelism
from smpar.nn.registry import tp_register, tp_register_with_module
from smpar.optimizer import DistributedOptimizer, clip_grad_norm_
from smpar.ranks import *  # noqa: F403
from smpar.ranks import __all__ as _rank_functions
from smpar.runtime.core import init, is_initialized, is_tracing, shutdown
from smpar.runtime.module_graph import module_graph
from smpar.runtime.partitioning import partition
from smpar.runtime.step import step
from smpar.stage.split import StepOutput
from smpar.trace.graph import ModuleGraph

WORLD = CommGroup.WORLD
PP_GROUP, TP_GROUP, MP_GROUP = CommGroup.PP_GROUP, CommGroup.TP_GROUP, CommGroup.MP_GROUP
DP_GROUP, RDP_GROUP = CommGroup.DP_GROUP, CommGroup.RDP_GROUP
WORLD_RANK, PP_RANK, TP_RANK = RankType.WORLD_RANK, RankType.PP_RANK, RankType.TP_RANK
MP_RANK, DP_RANK, RDP_RANK = RankType.MP_RANK, RankType.DP_RANK, RankType.RDP_RANK

__all__ = [
    # start and end
    "init", "shutdown", "is_initialized", "is_tracing",
    # training
    "step", "StepOutput", "DistributedModel", "DistributedOptimizer", "clip_grad_norm_", "amp",
    "partition", "set_partition",
    # tensor parallelism
    "nn", "tensor_parallelism", "set_tensor_parallelism", "model_creation", "tp_register", "tp_register_with_module",
    # planning
    "plan", "plans_text", "plans_page",
    # seeing
    "report", "timetable", "metrics", "module_graph", "ModuleGraph", "SmparError",
    # ranks, groups, messages
    *_rank_functions,
    "CommGroup", "WORLD", "PP_GROUP", "TP_GROUP", "MP_GROUP", "DP_GROUP", "RDP_GROUP",
    "RankType", "WORLD_RANK", "PP_RANK", "TP_RANK", "MP_RANK", "DP_RANK", "RDP_RANK",
    "barrier", "pp_barrier", "tp_barrier", "mp_barrier", "dp_barrier", "rdp_barrier",
    "send", "recv_from", "broadcast", "allgather",
]  # fmt: skip
