"""What goes wrong in the steps of test_steps.py; these functions run in the worker processes.

Each returns what its rank saw (`Seen`); the model is a chain of blocks in which one rank's real forward or backward,
never the trace, can be made to fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smpar as smp
from smpar.comm import stall
from smpar.config import Config

WIDTH = 8
BATCH = 8


class Boom(Exception):
    """What a user's module raises."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """An exception as one rank's user sees it; ``error`` is empty if there was none.

    Attributes:
        rank: the failing rank that it names, where it names one.
        trace: traceback of the failing rank that it carries.
        seconds: from the start of the step that failed to the exception.
    """

    error: str = ""
    text: str = ""
    rank: int = -2
    trace: str = ""
    seconds: float = 0.0
    values: tuple[Any, ...] = ()


# -- the model -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fault:
    """Set in the process that shall fail: where, and what then happens."""

    where: str
    act: Callable[[], None]
    calls: int = 0


_fault: list[Fault | None] = [None]


def _trip(where: str) -> None:
    fault = _fault[0]
    if fault is not None and fault.where == where:
        fault.calls += 1
        if fault.calls == 2:  # in the middle of the step: the first microbatch has passed
            fault.act()


class _Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _trip("backward")
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # real data: not the trace
            _trip("forward")
        return _Tripwire.apply(torch.tanh(self.linear(x)))  # type: ignore[no-any-return, no-untyped-call]


class Hooked(nn.Module):
    """Its backward can be split, as no custom function is in the way: I calls the first hook, W the second.

    h = linear(x)       I   gradient of h ─▶ inputs
                        W   gradient of the weight ─▶ weights
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_post_accumulate_grad_hook(lambda weight: _trip("weights"))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if type(x) is Tensor:
            h.register_hook(lambda gradient: _trip("inputs"))
        return torch.tanh(h)


class Net(nn.Module):
    """Blocks in a row; ``tied``: the first and the last share their weight."""

    def __init__(self, blocks: int, tied: bool = False, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        if tied:
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def start(config: dict[str, Any] | None = None) -> int:
    """Init over all ranks as one pipeline; returns the number of stages."""
    whole = {
        "pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]),
        "microbatches": 4,
        "ddp": True,
        **(config or {}),
    }
    smp.init(whole)
    torch.manual_seed(1)
    return Config.from_dict(whole).stages


def by_hand(net: Any, stages: int) -> Any:
    """Block i on stage i * stages // blocks."""
    for i, block in enumerate(net.blocks):
        smp.set_partition(block, i * stages // len(net.blocks))
    return net


def batch(seed: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, WIDTH, generator=generator)


@smp.step
def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def seen(action: Callable[[], Any]) -> Seen:
    """Performs a user's action and notes how it ends."""
    since = time.monotonic()
    try:
        value = action()
    except BaseException as error:
        return Seen(
            type(error).__name__,
            str(error) if isinstance(error, smp.SmparError) else "".join(traceback.format_exception(error)),
            getattr(error, "rank", -2),
            getattr(error, "trace", ""),
            time.monotonic() - since,
        )
    return Seen(seconds=time.monotonic() - since, values=(value,))


# -- one rank fails in its own unit --------------------------------------------------------------------------------


def _raise() -> None:
    raise Boom("no such luck")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _control_c() -> None:
    """A real SIGINT, as from the keyboard, that reaches this rank while its unit computes."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(60.0)


ACTS: dict[str, Callable[[], None]] = {
    "raise": _raise, "kill": _kill, "interrupt": _interrupt, "control-c": _control_c
}  # fmt: skip


def fail_in_step(rank: int, where: str, step: int, act: str, config: dict[str, Any], tied: bool = False) -> Seen:
    """Rank ``rank`` fails in its own unit in step ``step``, at the second forward or (part of a) backward there."""
    stages = start(config)
    block = Hooked if where in ("inputs", "weights") else Block
    model = smp.DistributedModel(by_hand(Net(2 * stages, tied, block), stages))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for number in range(step):
        train(model, *batch(number))
        optimizer.step()
    if smp.rank() == rank:
        _fault[0] = Fault(where, ACTS[act])
    # A rank that has sent all that the others need is done with the step, and learns it with its next call.
    return seen(lambda: (train(model, *batch(step)), smp.barrier()))


def caught_by_the_user(rank: int, catching: tuple[int, ...]) -> tuple[Seen, Seen, Seen]:
    """As above; the ranks in ``catching`` handle the exception and go on: to a step, a state dict."""
    stages = start()
    model = smp.DistributedModel(by_hand(Net(stages), stages))
    train(model, *batch(0))
    if smp.rank() == rank:
        _fault[0] = Fault("forward", _raise)
    first = seen(lambda: (train(model, *batch(1)), smp.barrier()))
    if smp.rank() not in catching:
        return first, Seen(), Seen()
    return first, seen(lambda: train(model, *batch(2))), seen(model.state_dict)


def fails_between_steps(rank: int, waiting: str) -> Seen:
    """Rank ``rank`` raises in its own code outside of a step, uncaught, while the others wait for it."""
    stages = start()
    model = smp.DistributedModel(by_hand(Net(stages), stages))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train(model, *batch(0))
    optimizer.step()
    if smp.rank() == rank:
        try:
            raise Boom("in the user's own code")
        except Boom:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # what the interpreter does with it
            return Seen("Boom", "own")
    waits: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "optimizer": optimizer.state_dict,
        "norm": lambda: smp.clip_grad_norm_(model, 1.0),
        "step": lambda: train(model, *batch(1)),
        "barrier": smp.barrier,
    }
    return seen(waits[waiting])


# -- ranks that are called differently -----------------------------------------------------------------------------


@smp.step
def other_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(model(x), y)


@smp.step
def step_by_rank(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    if smp.rank() == 1:
        out = torch.relu(out)
    loss = F.mse_loss(out, y)
    model.backward(loss)
    return loss


class SkipsByRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 1 and smp.rank() == 1:
                continue
            x = block(x)
        return x


def called_differently(how: str, steps: int, config: dict[str, Any]) -> Seen:
    """After ``steps`` good steps rank 1 does the next one unlike the others."""
    stages = start(config)
    odd = smp.rank() == 1
    cls = SkipsByRank if how == "blocks" else Net
    model = smp.DistributedModel(by_hand(cls(2 * stages), stages))
    for number in range(steps):
        train(model, *batch(number))
    x, y = batch(steps)
    if how == "values":
        return seen(lambda: train(model, *batch(steps + odd)))
    if how == "target":
        return seen(lambda: train(model, x, y + 1e-3 if odd else y))
    if how == "samples":
        return seen(lambda: train(model, *batch(steps, 12 if odd else 8)))
    if how == "width":
        return seen(lambda: train(model, x[:, :-1] if odd else x, y))
    if how == "dtype":
        return seen(lambda: train(model, x.double() if odd else x, y))
    if how == "few samples":
        return seen(lambda: train(model, *batch(steps, 3 if odd else 8)))
    if how == "arguments":
        return seen(lambda: train(model, x, y=y) if odd else train(model, x, y))
    if how == "function":
        return seen(lambda: (other_step if odd else train)(model, x, y))
    if how == "skipped":
        if odd:
            return seen(lambda: train(model, *batch(steps + 1)))
        return seen(lambda: [train(model, *batch(steps + k)) for k in range(2)])
    if how == "eval":
        if odd:
            model.eval()
        return seen(lambda: train(model, x, y))
    if how == "frozen":
        if odd:
            model.module.blocks[0].requires_grad_(False)
        return seen(lambda: train(model, x, y))
    if how == "no_grad":
        with torch.no_grad() if odd else contextlib.nullcontext():
            return seen(lambda: other_step(model, x, y))
    if how == "glue":
        return seen(lambda: step_by_rank(model, x, y))
    if how == "blocks":
        return seen(lambda: train(model, x, y))
    raise AssertionError(how)


def random_states_differ() -> list[float]:
    """Each rank's generators stand elsewhere; dropout is active."""
    stages = start()
    torch.manual_seed(1)
    net = by_hand(Net(2 * stages), stages)
    for block in net.blocks:
        block.dropout = nn.Dropout(0.5)
        block.forward = lambda x, b=block: b.dropout(torch.tanh(b.linear(x)))
    model = smp.DistributedModel(net)
    torch.manual_seed(100 + smp.rank())
    torch.rand(smp.rank())
    return [float(train(model, *batch(0)).reduce_mean()) for _ in range(3)]


def waits_for_a_late_rank(what: str, seconds: float) -> list[str]:
    """Rank 1 comes late to a step or barrier; returns what this rank said meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("smpar").addHandler(Keep())
    stall.PATIENCE = seconds / 2
    stall.ANSWER = 0.8
    stages = start()
    model = smp.DistributedModel(by_hand(Net(stages), stages))
    train(model, *batch(0))
    if smp.rank() == 1:
        late(seconds + 2.0)
    if what == "step":
        train(model, *batch(1))
    else:
        smp.barrier()
    return said


def late(seconds: float) -> None:
    time.sleep(seconds)


# -- mistakes that all ranks make ----------------------------------------------------------------------------------


def _model(stages: int, **options: Any) -> Any:
    return smp.DistributedModel(by_hand(Net(2 * stages), stages), **options)


def _backward_outside(stages: int) -> None:
    _model(stages).backward(torch.ones((), requires_grad=True))


def _backward_after_the_step(stages: int) -> None:
    model = _model(stages)
    loss = train(model, *batch(0))
    model.backward(loss.reduce_mean())


def _call_outside(stages: int) -> None:
    _model(stages)(batch(0)[0])


def _small_batch(stages: int) -> None:
    train(_model(stages), *batch(0, 3))


def _samples_differ(stages: int) -> None:
    train(_model(stages), batch(0, 8)[0], batch(0, 9)[1])


def _unit_count(stages: int) -> None:
    train(smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 1)))), *batch(0))


def _not_scalar(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x))

    step(_model(stages), batch(0)[0])


def _detached_loss(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).mean().detach())

    step(_model(stages), batch(0)[0])


def _plain_loss(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model(x)
        model.backward(x.mean())

    step(_model(stages), batch(0)[0])


def _loss_is_a_float(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model(x)
        model.backward(1.0)

    step(_model(stages), batch(0)[0])


def _step_in_step(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = train(model, x, y)
        return loss

    step(_model(stages), *batch(0))


def _argument_names(stages: int) -> None:
    smp.step(non_split_inputs=["z"])(lambda model, x, y: None)


def _axis_names(stages: int) -> None:
    smp.step(input_split_axes={"xx": 1})(lambda model, x, y: None)


def _no_model(stages: int) -> None:
    train(nn.Linear(WIDTH, WIDTH), *batch(0))


def _second_init(stages: int) -> None:
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 8})


def _index_in_set_partition(stages: int) -> None:
    smp.set_partition(nn.Linear(2, 2), stages)


def _index_in_partition(stages: int) -> None:
    with smp.partition(stages):
        nn.Linear(2, 2)


def _raises_in_glue(stages: int) -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model(x)
        raise Boom("in glue")

    step(_model(stages), batch(0)[0])


def _wrong_argument(stages: int) -> None:
    train(_model(stages), batch(0)[0])


def _wrong_shape(stages: int) -> None:
    x, y = batch(0)
    train(_model(stages), x[:, :-1], y)


_switch: set[str] = set()


class Hidden(Net):
    """A switch outside of the model, which no signature shows, decides what runs."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks)
        if "reverse" in _switch:
            blocks.reverse()
        if "skip" in _switch:
            blocks = blocks[:1] + blocks[2:]
        if "twice" in _switch:
            blocks = blocks + blocks[-1:]
        for block in blocks:
            x = block(x)
        return x


def _switched(name: str) -> Callable[[int], None]:
    def mistake(stages: int) -> None:
        model = smp.DistributedModel(by_hand(Hidden(2 * stages), stages))
        train(model, *batch(0))
        train(model, *batch(1))
        _switch.add(name)
        train(model, *batch(2))

    return mistake


class DataShaped(Block):
    """The number of columns depends on the data, which the trace cannot see."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if type(x) is Tensor and float(x.detach().abs().sum()) > 0:
            return out[:, :4]
        return out


def _shape_by_data(stages: int) -> None:
    net = Net(2 * stages)
    net.blocks[-1] = DataShaped()
    train(smp.DistributedModel(by_hand(net, stages)), *batch(0))


class NoneByData(Block):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return None if type(x) is Tensor else out


def _none_by_data(stages: int) -> None:
    net = Net(2 * stages)
    net.blocks[-1] = NoneByData()
    train(smp.DistributedModel(by_hand(net, stages)), *batch(0))


class Borrows(Block):
    """A unit that uses the weight of another, which is not its child."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lenders = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.lenders[0].linear.weight)  # type: ignore[union-attr, arg-type]


def borrowed_weight() -> tuple[Seen, list[float]]:
    """Three steps of a model whose last block uses the first one's weight; the truth by one process, too."""
    stages = start()

    def make() -> Net:
        torch.manual_seed(3)
        net = Net(2 * stages)
        net.blocks[-1] = Borrows(net.blocks[0])
        return net

    model = smp.DistributedModel(by_hand(make(), stages))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5))
    alone = make()
    plain = torch.optim.SGD(alone.parameters(), 0.5)
    truth = []

    def steps() -> list[float]:
        found = []
        for number in range(3):
            optimizer.zero_grad()
            found.append(float(train(model, *batch(number)).reduce_mean()))
            optimizer.step()
        return found

    for number in range(3):
        x, y = batch(number)
        plain.zero_grad()
        loss = F.mse_loss(alone(x), y)
        loss.backward()
        plain.step()
        truth.append(float(loss.detach()))
    return seen(steps), truth


MISTAKES: dict[str, Callable[[int], None]] = {
    "backward outside of a step": _backward_outside,
    "backward after the step": _backward_after_the_step,
    "model called outside of a step": _call_outside,
    "batch smaller than the microbatches": _small_batch,
    "tensors differ in samples": _samples_differ,
    "fewer units than stages": _unit_count,
    "backward of several elements": _not_scalar,
    "backward of a detached loss": _detached_loss,
    "backward of an input": _plain_loss,
    "backward of a float": _loss_is_a_float,
    "step in a step": _step_in_step,
    "unknown non_split_inputs": _argument_names,
    "unknown input_split_axes": _axis_names,
    "no DistributedModel": _no_model,
    "second init": _second_init,
    "index in set_partition": _index_in_set_partition,
    "index in partition": _index_in_partition,
    "exception in glue": _raises_in_glue,
    "missing argument": _wrong_argument,
    "shapes that no module takes": _wrong_shape,
    "order changes": _switched("reverse"),
    "a module less": _switched("skip"),
    "a module more": _switched("twice"),
    "shape depends on data": _shape_by_data,
    "result depends on data": _none_by_data,
}


def mistake(name: str, config: dict[str, Any] | None = None) -> Seen:
    stages = start(config)
    return seen(lambda: MISTAKES[name](stages))


def bad_init(config: dict[str, Any], by_rank: dict[int, dict[str, Any]]) -> Seen:
    """An init that cannot be; ``by_rank`` changes some ranks' configuration."""
    return seen(lambda: smp.init({**config, **by_rank.get(int(os.environ["RANK"]), {})}))
