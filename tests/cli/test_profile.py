"""`smpar profile`: layers, links and parameters as the model has them, times as a direct timing finds them."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smpar.cli.entry import load
from smpar.cli.main import WRONG, main
from smpar.planner.profile import Profile
from smpar.probe import whole
from smpar.probe.model import profile_model
from smpar.probe.traces import resized
from smpar.runtime import measure, module_graph
from tests.cli import entries

ENTRY = "tests.cli.entries"


def directly(size: int) -> float:
    """CPU seconds of a forward and backward of the whole."""
    model, batch, step = entries.tower()
    ids, targets = (t[torch.arange(size) % 3] for t in batch)
    found = []
    for _ in range(12):
        start = time.process_time()
        step(model, ids, targets).backward()
        found.append(time.process_time() - start)
    return statistics.median(found[2:])


def test_a_profile_is_of_the_model(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    # of one thread: what else the machine does does not count
    for module in (measure, whole):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=time.process_time))
    path = tmp_path / "profile.json"
    before = torch.get_num_threads()
    try:
        assert main(["profile", f"{ENTRY}:tower", "-o", str(path), "--microbatch-sizes", "16,1,4", "--threads", "1",
                     "--device", "cpu"]) == 0  # fmt: skip
        seconds = {size: directly(size) for size in (1, 4, 16)}
    finally:
        torch.set_num_threads(before)
    assert "16 samples: forward" in capsys.readouterr().out
    profile = Profile.from_file(path)
    assert [layer.name for layer in profile.layers] == ["embed", *(f"blocks.{i}" for i in range(20)), "head"]
    # parameters: the token goes with what reads it; the tied ones are in both
    block = 2 * 64 + 2 * 4 * 64 * 64 + 4 * 64 + 64
    assert [layer.parameters for layer in profile.layers] == [50 * 64 + 64, *[block] * 20, 50 * 64]
    assert [(t.layers, t.parameters) for t in profile.tied] == [((0, 21), 50 * 64)]
    assert [(t.source, t.targets, t.elements, t.gradient) for t in profile.tensors] == [
        (i, (i + 1,), 16 * 64, True) for i in range(21)
    ]
    assert profile.layers[3].output == 4 * 16 * 64 and profile.layers[21].output == 4 * 16 * 50
    assert profile.layers[3].saved >= 4 * 16 * (64 + 256), "at least the inputs of both products, per sample"
    # times
    times = profile.times_of("cpu", 1)
    assert times.microbatches == (1, 4, 16)
    for forward, backward, weight in zip(times.forward, times.backward, times.weight, strict=True):
        assert min(forward) > 0 and min(backward) > 0
        assert all(0 <= w <= b for w, b in zip(weight, backward, strict=True))
        assert weight[0] > 0 and all(w > 0 for w in weight[1:21]), "parameters have gradients"
        assert len(set(forward[1:21])) == 1, "equal blocks are measured once"
    totals = {m: sum(f) + sum(b) for m, f, b in zip((1, 4, 16), times.forward, times.backward, strict=True)}
    assert totals[1] < totals[4] < totals[16]
    print({size: totals[size] / direct for size, direct in seconds.items()})
    for size, direct in seconds.items():
        assert direct / 1.5 < totals[size] < 1.5 * direct, f"{size} samples: {totals[size]} s, directly {direct} s"


def test_profiling_leaves_the_model_as_it_was(seed: int) -> None:
    torch.manual_seed(seed)
    model, batch, step = entries.tower()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    profile_model(model, batch, {}, [2], torch.device("cpu"), step)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())


def test_a_unit_that_fills_a_cache_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_graph, "may_open", lambda module: isinstance(module, entries.Chat))
    model, batch = entries.chat()
    profile = profile_model(model, (batch,), {}, [4], torch.device("cpu"))
    assert [layer.name for layer in profile.layers] == ["first", "middle", "last"]
    assert profile.times[0].weight[0][1] > 0, "a unit that is not measured has no such part"


def test_a_batch_is_cut_or_repeated(seed: int) -> None:
    torch.manual_seed(seed)
    x, mask, table = torch.randn(3, 2, requires_grad=True), torch.ones(3, dtype=torch.bool), torch.randn(7, 2)
    args, kwargs = resized(((x, "text"), {"mask": mask, "table": table}), 5)
    assert torch.equal(args[0], x[[0, 1, 2, 0, 1]]) and args[0].requires_grad and args[1] == "text"
    assert kwargs["mask"].shape == (5,) and kwargs["table"] is table
    assert torch.equal(resized(((x,), {}), 2)[0][0], x[:2])


def test_arguments_by_name_and_files() -> None:
    entry = load(f"{ENTRY}:by_name")
    assert entry.args == () and list(entry.kwargs) == ["ids"] and entry.step is None
    assert load(f"{entries.__file__}:by_name").kwargs["ids"].shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["tower"], "an entry point is module:function"),
        ([f"{ENTRY}:towr"], "did you mean 'tower'?"),
        (["tests.cli.entrance:tower"], "No module named 'tests.cli.entrance'"),
        (["tests/cli/entrance.py:tower"], "an entry point's file exists"),
        ([f"{ENTRY}:nothing"], "returns (model, batch)"),
        ([f"{ENTRY}:no_batch"], "a batch has a tensor with samples"),
        ([f"{ENTRY}:on_meta"], "measured on real parameters"),
        ([f"{ENTRY}:not_alone", "--microbatch-sizes", "1,4"], "ValueError at 1 samples"),
        ([f"{ENTRY}:tower", "--microbatch-sizes", "1,x"], "'1,x'"),
        ([f"{ENTRY}:tower", "--microbatch-sizes", "0"], "at least 1"),
    ],
)
def test_what_goes_wrong(arguments: list[str], found: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    assert main(["profile", *arguments, "-o", str(output), "--device", "cpu"]) == WRONG
    assert found in capsys.readouterr().err and not output.exists()


def test_timing_the_whole_leaves_what_modules_keep() -> None:
    """Attributes that a forward leaves in its modules, statistics, and gradients."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.seen = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.norm(self.linear(x))
            return self.seen

    model, x = Keeps(), torch.randn(4, 3)
    model.linear.weight.grad = gradient = torch.ones(3, 3)
    mean = model.norm.running_mean.clone()
    forward, backward = whole.whole_seconds(model, ((x,), {}), model, torch.device("cpu"), 0.0)
    assert forward > 0 and backward > 0
    assert model.seen is None and torch.equal(model.norm.running_mean, mean)
    assert model.linear.weight.grad is gradient and torch.equal(gradient, torch.ones(3, 3))
    assert model.linear.bias.grad is None
