"""AMP's published experiments as clusters, profiles and strategies.

A folder holds ``layer_costs.json``, and ``cluster_X.json`` with ``trials_X.json`` for each experiment X: forward
seconds of one sample by layer, device type and tensor-parallel degree; and trials, with the seconds that AMP predicted
and that were measured. What a microbatch of m samples takes follows by a roofline (`smpar.planner.hardware.Kernels`)::

    one sample   |= host =|- arithmetic -|~ memory ~|* collectives *|        as profiled
    m samples    |= host =|- arithmetic -|- ... -|~ memory ~|~ ... ~|* collectives *|* ... *|
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benches._kernels import HALF, Work, attention, kept, stretched
from smpar.planner.amp_form import AmpCosts
from smpar.planner.cluster import Cluster, DeviceType, Link, Node
from smpar.planner.cost import CostModel
from smpar.planner.hardware import DEEPSPEED, GIB, Kernels, Runtime
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times
from smpar.planner.strategy import Strategy

DATA = Path(__file__).with_name("amp")
LABELS = {"het_model": "transgan"}
"""What an experiment is called in the figures, where not by its file."""
BANDWIDTH = {"T4": 320e9, "V100": 900e9}
"""Bytes per second of device memory, from the data sheets; the files do not have it."""
LIMITED = ("T4",)
"""Cards whose power limit lowers their clock under a lasting load."""
SIZES = (1.0, 64.0)
"""Microbatch sizes of the profiles: times are a straight line."""


@dataclass(frozen=True)
class Trial:
    """What AMP tried.

    Attributes:
        predicted: seconds of a step, by AMP's closed form.
        measured: seconds of a step, or None: it did not fit, hung, or took too long.
    """

    strategy: Strategy
    predicted: float
    measured: float | None


@dataclass(frozen=True)
class Experiment:
    """A model on a cluster, and its trials; ``raw`` and ``costs`` are the files' layers and times."""

    name: str
    cluster: Cluster
    raw: Sequence[Mapping[str, Any]]
    costs: Mapping[str, Mapping[int, Sequence[float]]]
    global_batch: int
    trials: tuple[Trial, ...]

    @property
    def transformer(self) -> bool:
        """GPT-2: its first and last layers share a weight, and its layers ran twice."""
        return any(layer["type"] == "transformer_layer" for layer in self.raw)

    @cached_property
    def amp(self) -> AmpCosts:
        """What AMP's closed form knows of the model."""
        raw = self.raw
        used = [layer.get("in_amp_cost", True) for layer in raw]
        forward = {
            (device, tp): tuple(seconds if use else 0.0 for seconds, use in zip(row, used, strict=True))
            for device, table in self.costs.items()
            for tp, row in table.items()
        }
        return AmpCosts(
            forward,
            tuple(float(layer["amp_param_count"]) for layer in raw),
            tuple(float(layer["amp_boundary_elems_per_sample"]) for layer in raw),
            tuple(bool(layer.get("amp_boundary_div_by_tp", False)) for layer in raw),
            tuple(i + 1 for i, use in enumerate(used[:-1]) if use),
            (Tied((0, 28), float(raw[28]["amp_param_count"])),) if self.transformer else (),
        )

    def profile(self, runtime: Runtime = DEEPSPEED, kernels: Kernels = Kernels()) -> Profile:  # noqa: B008
        """The model as the planner sees it, on the device types of this cluster."""
        return _Conversion(self, runtime, kernels).profile()

    def model(self, runtime: Runtime = DEEPSPEED, kernels: Kernels = Kernels()) -> CostModel:  # noqa: B008
        """The planner's cost model of it."""
        return CostModel(self.profile(runtime, kernels), self.cluster, runtime)


def experiments(folder: Path = DATA) -> list[Experiment]:
    """All of a folder, the smaller device types first."""
    costs = json.loads((folder / "layer_costs.json").read_text())
    names = sorted((path.stem.removeprefix("trials_") for path in folder.glob("trials_*.json")), reverse=True)
    return [_experiment(folder, name, costs) for name in names]


def _experiment(folder: Path, name: str, costs: Mapping[str, Any]) -> Experiment:
    given = json.loads((folder / f"cluster_{name}.json").read_text())
    found = json.loads((folder / f"trials_{name}.json").read_text())
    table = costs[given["model"]["type"]]
    batch = int(given["model"]["global_batch"])
    times = {
        key.split("(")[0]: {int(tp): tuple(map(float, row)) for tp, row in rows.items()}
        for key, rows in table["device_tp"].items()
    }
    return Experiment(
        LABELS.get(name, name),
        cluster_of(given),
        table["layers"],
        times,
        batch,
        tuple(Trial(_strategy(t, batch), t["amp_predicted_s"], t["measured_s"]) for t in found["trials"]),
    )


def cluster_of(given: Mapping[str, Any]) -> Cluster:
    """The cluster of such a file: network rates as AMP states them, and no latencies."""
    types = {
        name: DeviceType(name, d["memory_gib"] * GIB, d["peak_fp16_tflops"] * 1e12, BANDWIDTH[name])
        for name, d in given["devices"].items()
        if any(n["device"] == name for n in given["nodes"])
    }
    nodes = tuple(
        Node(
            n["instance"], n["device"], n["gpus"], Link(n["intra_gbps"] * 1e9 / 8, 0.0),
            Link(n["inter_gbps"] * 1e9 / 8, 0.0),
        )
        for n in given["nodes"]
    )  # fmt: skip
    return Cluster(tuple(types[name] for name in dict.fromkeys(n.device for n in nodes)), nodes)


def _strategy(t: Mapping[str, Any], batch: int) -> Strategy:
    tp, pp, dp, microbatch = t["tp"], t["pp"], t["dp"], t["microbatch_size"]
    return Strategy(
        tp, pp, dp, microbatch, batch // (microbatch * dp), "1f1b", 1, tuple(t["cuts"][:-1]), tuple(range(tp * pp * dp))
    )


class _Conversion:
    """From one profiled number per layer to everything that the planner wants to know of it."""

    def __init__(self, experiment: Experiment, runtime: Runtime, kernels: Kernels) -> None:
        self.experiment, self.runtime, self.kernels = experiment, runtime, kernels
        self.works = [_work(layer, kernels) for layer in experiment.raw]

    def profile(self) -> Profile:
        layers = tuple(self._layer(i) for i in range(len(self.works)))
        tensors = tuple(Tensor(i, (i + 1,), self._out(i)) for i in range(len(layers) - 1))
        used = [t for t in self.experiment.cluster.types if t.name in self.experiment.costs]
        times = tuple(self._times(t, tp) for t in used for tp in self.experiment.costs[t.name])
        tied = (Tied((0, 28), float(self.experiment.raw[28]["real_param_count"])),)
        return Profile(layers, tensors, times, tied if self.experiment.transformer else ())

    def _out(self, i: int) -> float:
        return float(self.experiment.raw[i]["real_boundary_elems_per_sample"])

    def _layer(self, i: int) -> Layer:
        raw, work = self.experiment.raw[i], self.works[i]
        parameters = float(raw["real_param_count"])
        name = f"{raw['type']}.{raw['index']}"
        whole = 0.0 if work.divided else parameters
        return Layer(name, parameters, work.saved, whole, work.whole_saved, HALF * self._out(i))

    def _times(self, device: DeviceType, tp: int) -> Times:
        row = self.experiment.costs[device.name][tp]
        alike: dict[tuple[object, ...], list[float]] = {}
        keys = [
            (layer["type"], layer["module"], work) for layer, work in zip(self.experiment.raw, self.works, strict=True)
        ]
        for key, seconds in zip(keys, row, strict=True):
            alike.setdefault(key, []).append(seconds)
        measured = [statistics.median(alike[key]) for key in keys]  # layers that are the same take the same time
        rates = [n.intra.bandwidth for n in self.experiment.cluster.nodes if n.device == device.name]
        passes = 2 if self.experiment.transformer else 1  # the profile's and the trials' layers ran their forward twice
        both = [
            stretched(
                seconds, work, passes if work.collectives else 1, device, tp, min(rates) * self.runtime.intra,
                self.kernels, device.name in LIMITED,
            )
            for seconds, work in zip(measured, self.works, strict=True)
        ]  # fmt: skip
        return Times(
            device.name,
            tp,
            SIZES,
            *(tuple(tuple(line.at(m) for line in way) for m in SIZES) for way in zip(*both, strict=True)),
        )


def _work(raw: Mapping[str, Any], kernels: Kernels) -> Work:
    """What a layer does, by its type; dimensions are those of AMP's GPT-2 and TransGAN."""
    kind, out = raw["type"], float(raw["real_boundary_elems_per_sample"])
    if kind == "transformer_layer":
        return attention(1024, 1024, 1024, 16, score=5)  # of a score: 2 and 2 in half precision, a dropout mask of 1
    if kind == "block_dim1024":
        return attention(81, 81, 1024, 4, score=4)  # no dropout here
    if kind == "block_dim16":  # 256 windows; tensor parallelism divides neither its measured time nor its scores
        return attention(256 * 324, 324, 16, 4, score=4, shrinks=False)
    if kind == "embed2h":
        return Work(0.0, 4 * out, whole_saved=kept(out), saved=kept(out), divided=True)
    if kind == "embed2v":
        held = kernels.logit_bytes * out
        return Work(2.0 * out * 1024, 2 * out, weighted=2.0 * out * 1024, saved=held, divided=True, logits=out)
    if raw["module"] == "fp16_to_fp32":  # what it keeps is in logit_bytes
        return Work(0.0, 6 * out)
    return Work(0.0, 4 * out, saved=kept(out), whole_saved=kept(out))
