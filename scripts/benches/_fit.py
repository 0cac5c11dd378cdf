"""How well predictions meet AMP's measured trials; and constants fitted on some trials and scored on the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benches._amp import Experiment, Trial
from smpar.planner.amp_form import amp_seconds
from smpar.planner.cost import CostModel, Prediction
from smpar.planner.hardware import DEEPSPEED, Kernels, Runtime

Which = Callable[[Trial], bool]
_FEW = 4
"""Trials that ran, for a rank correlation to mean something."""
CLOSE = 1e-4
"""AMP's predictions are printed with four decimals."""


@dataclass(frozen=True)
class Score:
    """Predictions against measurements.

    Attributes:
        spearman: rank correlation over the trials that ran.
        mare: mean relative error, absolute; `bias`: the same with its sign.
        regret: measured seconds of the first choice / of the best.
        oom: of the first ten choices, how many did not run.
        feasible: share of the trials that ran that are called feasible; `wrong`: of those that did not run.
    """

    spearman: float
    mare: float
    bias: float
    regret: float
    oom: int
    feasible: float
    wrong: float

    def __str__(self) -> str:
        return (
            f"Spearman {self.spearman:.3f}  error {self.mare:.3f}  bias {self.bias:+.3f}  first choice "
            f"{self.regret:.3f} x best  not run of first ten {self.oom}  called feasible: {self.feasible:.0%} of ran, "
            f"{self.wrong:.0%} of others"
        )


@dataclass(frozen=True)
class Constants:
    """What may be fitted."""

    runtime: Runtime = DEEPSPEED
    kernels: Kernels = Kernels()  # noqa: RUF009

    def value(self, name: str) -> float:
        """Of a constant of either."""
        return float(getattr(self.kernels if hasattr(self.kernels, name) else self.runtime, name))

    def put(self, name: str, value: float) -> Constants:
        """With that one changed."""
        changed: dict[str, Any] = {name: value}
        if hasattr(self.kernels, name):
            return replace(self, kernels=replace(self.kernels, **changed))
        return replace(self, runtime=replace(self.runtime, **changed))

    def predict(self, experiment: Experiment) -> list[Prediction]:
        """All of its trials."""
        model = experiment.model(self.runtime, self.kernels)
        return [model.predict(trial.strategy) for trial in experiment.trials]


UNFITTED = Constants(replace(DEEPSPEED, nic=0.97, nic_most=5e9, intra=0.8, message_seconds=1e-3))
"""What one would guess without any trial: TCP's headers, 40 Gbit/s by TCP, PCIe's usual loss, a millisecond."""
SLOW = ("lasting", "nic_most", "intra", "message_seconds")
"""What trials on T4s, with fast cards and without NVLink, can tell."""
FAST = ("nic", "message_seconds")
"""What trials on V100s can tell."""


def score(trials: Sequence[Trial], seconds: Sequence[float], fits: Sequence[bool]) -> Score:
    """Of predicted seconds, and of what is called feasible."""
    ran = [(t.measured, s) for t, s in zip(trials, seconds, strict=True) if t.measured is not None]
    measured, predicted = np.array([y for y, _ in ran]), np.array([s for _, s in ran])
    chosen = sorted((s, i) for i, (s, fit) in enumerate(zip(seconds, fits, strict=True)) if fit)
    first = trials[chosen[0][1]].measured if chosen else None
    return Score(
        spearman(predicted, measured),
        float(np.mean(np.abs(predicted / measured - 1))),
        float(np.mean(predicted / measured - 1)),
        math.inf if first is None else first / float(measured.min()),
        sum(trials[i].measured is None for _, i in chosen[:10]),
        _share(fit for t, fit in zip(trials, fits, strict=True) if t.measured is not None),
        _share(fit for t, fit in zip(trials, fits, strict=True) if t.measured is None),
    )


def scored(experiment: Experiment, constants: Constants) -> Score:
    """The cost model's."""
    found = constants.predict(experiment)
    return score(experiment.trials, [p.seconds for p in found], [p.fits for p in found])


def amp_scored(experiment: Experiment) -> tuple[Score, int]:
    """The closed form's, which calls everything feasible; and how many of AMP's printed predictions it gives."""
    trials = experiment.trials
    found = [amp_seconds(experiment.amp, experiment.cluster, trial.strategy) for trial in trials]
    agree = sum(abs(mine - trial.predicted) < CLOSE for mine, trial in zip(found, trials, strict=True))
    return score(trials, found, [True] * len(trials)), agree


def table(experiment: Experiment, model: CostModel) -> list[str]:
    """A line for each trial."""
    lines = []
    for trial in experiment.trials:
        s, p = trial.strategy, model.predict(trial.strategy)
        right = "not run" if trial.measured is None else f"{trial.measured:5.2f} {p.seconds / trial.measured - 1:+6.1%}"
        lines.append(
            f"  m{s.microbatch:<3} tp{s.tp} dp{s.dp:<2} pp{s.pp:<2} pipeline {p.pipeline:6.3f} + reduction "
            f"{p.reduction:6.3f} + step {p.optimizer:.3f} = {p.seconds:6.3f}  {right:14} {-p.excess / 2**30:+7.2f} GiB"
        )
    return lines


def leave_out(all_: Sequence[Experiment]) -> Iterable[str]:
    """Lines: constants fitted on a part of the trials, and scores of the parts."""
    yield "nothing fitted"
    yield from _lines(all_, UNFITTED, {})
    for experiment in all_:
        names = SLOW if _slow(experiment) else FAST
        yield from _fitted(f"fitted on {experiment.name}", all_, {experiment.name: _everything}, names)
    parts: dict[str, Which] = {
        "a half": lambda t: _half(t) == 0,
        "the other half": lambda t: _half(t) == 1,
        "microbatches of 1 and 2": lambda t: t.strategy.microbatch <= 2,
        "tp 1": lambda t: t.strategy.tp == 1,
        "pp 1 and 2": lambda t: t.strategy.pp <= 2,
    }
    for name, which in parts.items():
        yield from _fitted(f"fitted on {name} of each", all_, {e.name: which for e in all_}, SLOW)


def _fitted(label: str, all_: Sequence[Experiment], seen: dict[str, Which], names: Sequence[str]) -> Iterable[str]:
    constants = fit([(e, seen[e.name]) for e in all_ if e.name in seen], UNFITTED, names)
    yield f"{label}: " + ", ".join(f"{name} {constants.value(name):.3g}" for name in names)
    yield from _lines(all_, constants, seen)


def _lines(all_: Sequence[Experiment], constants: Constants, seen: dict[str, Which]) -> Iterable[str]:
    for experiment in all_:
        which = seen.get(experiment.name)
        if which is _everything:
            yield f"  {experiment.name:12} (fitted)    {scored(experiment, constants)}"
        elif which is None:
            yield f"  {experiment.name:12} (left out)  {scored(experiment, constants)}"
        else:
            left = [t for t in experiment.trials if not which(t)]
            if sum(t.measured is not None for t in left) < _FEW:
                yield f"  {experiment.name:12} (left out)  fewer than {_FEW} ran"
            else:
                yield f"  {experiment.name:12} (left out)  {scored(replace(experiment, trials=tuple(left)), constants)}"


def fit(parts: Sequence[tuple[Experiment, Which]], start: Constants, names: Sequence[str]) -> Constants:
    """A pattern search over logarithms, in steps of 20 % to 3 %: coarse on purpose, these are physics, not decimals."""
    best, found, step = _misfit(parts, start), start, 0.2
    while step > 0.03:
        moved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                other = found.put(name, found.value(name) * factor)
                value = _misfit(parts, other)
                if value < best - 1e-5:
                    best, found, moved = value, other, True
                    break
        step = step if moved else step / 2
    return found


def _misfit(parts: Sequence[tuple[Experiment, Which]], constants: Constants) -> float:
    """Mean absolute and mean squared logarithm of predicted / measured, summed over the sets."""
    total = 0.0
    for experiment, which in parts:
        model = experiment.model(constants.runtime, constants.kernels)
        ratios = [
            math.log(model.predict(t.strategy).seconds / t.measured)
            for t in experiment.trials
            if t.measured is not None and which(t)
        ]
        total += float(np.mean(np.abs(ratios)) + np.mean(np.square(ratios)))
    return total


def _everything(_: Trial) -> bool:
    return True


def _half(trial: Trial) -> int:
    """A split that has nothing to do with times."""
    s = trial.strategy
    return (s.microbatch.bit_length() * 7 + s.tp * 5 + s.dp.bit_length() * 3) // 2 % 2


def _slow(experiment: Experiment) -> bool:
    return any(node.device == "T4" for node in experiment.cluster.nodes)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array([np.count_nonzero(values < v) + (np.count_nonzero(values == v) - 1) / 2 for v in values])


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else math.nan
