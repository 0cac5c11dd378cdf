"""``smpar.DistributedOptimizer``, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from smpar.comm.messages import CommGroup, allgather
from smpar.errors import ModelError
from smpar.mesh import Axis
from smpar.model import DistributedModel
from smpar.runtime.core import runtime
from smpar.runtime.wholes import PARTIAL, gather_optimizer_state, is_partial, own_slice, partial_marks
from smpar.stage.layout import Late


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any ``torch.optim`` optimizer made over ``model.parameters()`` before the partition.

    After the partition it holds this rank's parameters only. ``param_groups``, ``state`` and ``defaults`` are the
    wrapped optimizer's own, so learning-rate schedulers work on either.

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale, dynamic_loss_scale: only their defaults, since half-precision training is not built yet.

    Raises:
        ModelError: a loss scale was asked for, or ``optimizer`` is no optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ModelError(f"DistributedOptimizer of {type(optimizer).__name__}, which is no torch.optim optimizer")
        if static_loss_scale != 1.0 or dynamic_loss_scale:
            raise ModelError("a loss scale, but this version does not train in half precision")
        now = runtime()
        if isinstance(optimizer, torch.optim.LBFGS) and now.world.axis_size("pp") > 1:
            raise ModelError("LBFGS in a pipeline: it takes dot products over all parameters, and no stage holds all")
        self.optimizer = optimizer
        # a parameter's number in whole state dicts: its place over all groups, as torch counts
        self._order = [[p for p in group["params"]] for group in optimizer.param_groups]
        for parameter, state in optimizer.state.items():  # it may have stepped while the model was whole
            state.update({name: own_slice(value, parameter, now.world) for name, value in state.items()})
        now.adopt_optimizer(self)
        model = now.maybe_model
        if model is not None and model.pipeline is not None and model.partitioned:
            self.keep_local(model)

    # -- the wrapped optimizer's face -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters; then call the post-step hooks."""
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        now = runtime()
        for hook in now.post_step:
            hook(now.maybe_model, self)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, before the first step."""
        before = len(self.optimizer.param_groups)
        self.optimizer.add_param_group(param_group)
        for group in self.optimizer.param_groups[before:]:
            self._order.append(list(group["params"]))
        model = runtime().maybe_model
        if model is not None and model.partitioned:
            self.keep_local(model)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # -- partition and state --------------------------------------------------------------------

    def keep_local(self, model: DistributedModel) -> None:
        """Drop the parameters of other ranks, with their state."""
        mine = {id(p) for p in model.local_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        for p in list(self.optimizer.state):
            if id(p) not in mine:
                del self.optimizer.state[p]

    def take_over(self, model: DistributedModel, late: list[Late]) -> None:
        """Hold parameters that this rank has come to hold, with the state that their owners have for them.

        All ranks of a pipeline call it together.
        """
        pipeline = model.pipeline
        assert pipeline is not None
        numbers = self._numbers()
        mine = {
            numbers[id(one.parameter)]: self.optimizer.state[one.parameter]
            for one in late
            if id(one.parameter) in numbers and one.owner == pipeline.rank and one.parameter in self.optimizer.state
        }
        states = {number: state for part in allgather(mine, CommGroup.PP_GROUP) for number, state in part.items()}
        for group, order in zip(self.optimizer.param_groups, self._order, strict=True):
            group["params"] = [p for p in order if pipeline.holds(p)]
        for one in late:
            number = numbers.get(id(one.parameter))
            if one.taker == pipeline.rank and number in states:
                self.optimizer.state[one.parameter] = states[number]

    def _numbers(self) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for group in self._order:
            for p in group:
                numbers[id(p)] = len(numbers)
        return numbers

    def local_state_dict(self, **ignored: Any) -> dict[str, Any]:
        """This rank's part, with parameters numbered as in the whole state dict."""
        numbers = self._numbers()
        state = {numbers[id(p)]: s for p, s in self.optimizer.state.items() if id(p) in numbers}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in order]}
            for group, order in zip(self.optimizer.param_groups, self._order, strict=True)
        ]
        return {"state": state, "param_groups": groups, **partial_marks(_pipelined(), runtime().world)}

    def state_dict(self, **ignored: Any) -> dict[str, Any]:
        """The whole optimizer's state in torch's format, on every rank; all ranks of a replica call it together.

        Tensors of the shape of a parameter's slice are joined as the slices are; all else is taken to be alike.
        Numbers count the parameters of the model as it is: what `runtime.wholes` translates has those of its own.
        """
        now = runtime()
        local = self.local_state_dict()
        state, groups = local["state"], local["param_groups"]
        if local[PARTIAL]:
            pipeline = now.model.pipeline if _pipelined() else None
            with now.world.guard():
                state = gather_optimizer_state([p for g in self._order for p in g], state, pipeline, now.world)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any], **ignored: Any) -> None:
        """Load a whole or partial state dict, before or after the partition.

        Raises:
            ModelError: the groups differ from this optimizer's in number or size.
            OtherSlice: a partial state of another rank of the tensor-parallel group, or of another degree.
        """
        world = runtime().world
        partial = is_partial(state_dict, world)
        given = state_dict["param_groups"]
        sizes = [len(group) for group in self._order]
        if [len(group["params"]) for group in given] != sizes:
            raise ModelError(
                f"optimizer state with groups of {[len(g['params']) for g in given]} parameters, but here are {sizes}"
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        place: dict[int, int] = {}
        groups, state = [], {}
        for order, group in zip(self._order, given, strict=True):
            kept = [(p, number) for p, number in zip(order, group["params"], strict=True) if id(p) in held]
            for p, number in kept:
                place[number] = len(place)
                of = state_dict["state"].get(number)
                if of is not None:
                    state[place[number]] = of if partial else {k: own_slice(v, p, world) for k, v in of.items()}
            groups.append({**group, "params": [place[number] for _, number in kept]})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _pipelined() -> bool:
    model = runtime().maybe_model
    return model is not None and model.pipeline is not None and model.partitioned


def clip_grad_norm_(
    model: DistributedModel | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip gradients by their norm over all stages and slices; what several ranks hold alike counts once.

    Args:
        model: the model, or parameters of it.
        max_norm: gradients are scaled down so that their norm is at most this.
        norm_type: of the p-norm; ``inf`` for the largest element.

    Returns:
        the norm before clipping, a float64 scalar, the same on every rank of the replica.
    """
    now = runtime()
    wrapped = model if isinstance(model, DistributedModel) else now.model
    parameters = list(wrapped.parameters() if isinstance(model, DistributedModel) else model)
    pipeline = wrapped.pipeline if wrapped.partitioned else None
    with_grad = [p for p in parameters if p.grad is not None]
    first = now.world.axis_rank("tp") == 0
    counted = [
        p
        for p in with_grad
        if (pipeline is None or pipeline.owns(p)) and (first or wrapped.is_distributed_parameter(p))
    ]
    device = now.world.device
    norms = [
        torch.linalg.vector_norm(_values(p.grad), norm_type, dtype=_wide(p.grad)).to(device, torch.float64)
        for p in counted
    ]
    mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    largest = norm_type == float("inf")
    axis: Axis = "tp" if pipeline is None else "mp"
    with torch.no_grad():
        total = mine.max() if largest else (mine**norm_type).sum()
        if now.world.axis_size(axis) > 1:
            with now.world.guard():
                operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
                dist.all_reduce(total, operation, group=now.world.process_group(axis))
        if not largest:
            total = total ** (1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for p in with_grad:
            assert p.grad is not None
            p.grad.mul_(factor.to(p.grad.dtype))
    return total


def _values(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.coalesce().values() if grad.layout is torch.sparse_coo else grad


def _wide(grad: torch.Tensor | None) -> torch.dtype:
    assert grad is not None
    return torch.promote_types(grad.dtype, torch.float32)
