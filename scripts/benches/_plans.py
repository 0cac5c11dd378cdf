"""Our plan against the baselines' on one cluster, in simulation and executed by processes that sleep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import process_time

from benches._amp import Experiment
from benches._mixed import Case, Gpt
from smpar.errors import PlanError
from smpar.planner.amp_form import AmpCosts
from smpar.planner.baselines import ALL, BASELINES, amp
from smpar.planner.cluster import Cluster
from smpar.planner.cost import CostModel
from smpar.planner.hardware import SMPAR, Runtime
from smpar.planner.search import Progress, search
from smpar.planner.space import Constraints
from smpar.planner.strategy import Strategy


@dataclass(frozen=True)
class Compared:
    """On one cluster.

    Attributes:
        model: by which `seconds` are.
        strategies: by who chose it, "smpar" first.
        seconds: of a step, simulated.
        searched: CPU seconds of smpar's search.
    """

    name: str
    model: CostModel
    strategies: Mapping[str, Strategy]
    seconds: Mapping[str, float]
    searched: float
    uneven: bool

    @property
    def ours(self) -> float:
        return self.seconds["smpar"]

    @property
    def worst(self) -> float:
        """The best baseline's seconds / ours."""
        return min((s for name, s in self.seconds.items() if name != "smpar"), default=math.inf) / self.ours

    @property
    def megatron(self) -> float:
        """Megatron's rule's seconds, in its better reading, / ours."""
        return min((s for name, s in self.seconds.items() if name.startswith("megatron")), default=math.inf) / self.ours

    def lines(self) -> list[str]:
        """A table."""
        head = f"{self.name}  (searched in {self.searched:.2f} s)"
        return [
            head,
            *(
                f"  {name:15} {self.seconds[name]:8.4f} s {self.seconds[name] / self.ours:6.2f} x  {strategy}"
                for name, strategy in self.strategies.items()
            ),
        ]


def compare(
    name: str,
    model: CostModel,
    batch: int,
    constraints: Constraints = ALL,
    costs: AmpCosts | None = None,
    published: Strategy | None = None,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> Compared:
    """Let everybody choose.

    Args:
        costs: as AMP has measured the model.
        published: what AMP's code itself chose.
        skip: baselines that would take hours.
    """
    started = process_time()
    strategies = {"smpar": search(model, batch, constraints, progress=progress).best.strategy}
    searched = process_time() - started
    for who, choose in BASELINES.items():
        if who not in skip:
            try:
                strategies[who] = (
                    amp(model, batch, constraints, costs) if who == "amp" else choose(model, batch, constraints)
                )
            except PlanError as error:
                print(f"  {who}: {error.values}")
    if published is not None:
        strategies["amp, published"] = published
    seconds = {who: model.predict(strategy).seconds for who, strategy in strategies.items()}
    return Compared(
        name, model, strategies, seconds, searched, len({n.device for n in model.cluster.nodes}) > 1 or _cards(model)
    )


def compared_trials(experiment: Experiment, runtime: Runtime) -> Compared:
    """On the cluster of an experiment; AMP's own choice is the first of its trials that fits."""
    model = experiment.model(runtime)
    ranked = sorted(experiment.trials, key=lambda trial: trial.predicted)
    published = next((t.strategy for t in ranked if model.predict(t.strategy).fits), None)
    return compare(experiment.name, model, experiment.global_batch, costs=experiment.amp, published=published)


def mixed_experiment(all_: Sequence[Experiment]) -> Experiment | None:
    """GPT-2 on AMP's third cluster, three p3.8xlarge and one g4dn.12xlarge, if the parts of it are there."""
    gpt = next((e for e in all_ if e.transformer), None)
    v100 = next((e for e in all_ if e.cluster.nodes[0].device == "V100"), None)
    if gpt is None or v100 is None or len({n.device for e in all_ for n in e.cluster.nodes}) < 2:
        return None
    slow = next(n for n in gpt.cluster.nodes if n.device != "V100")
    types = {t.name: t for e in (gpt, v100) for t in e.cluster.types}
    cluster = Cluster((types["V100"], types[slow.device]), (*v100.cluster.nodes[:3], slow))
    return replace(gpt, name="3 p3.8xlarge + g4dn.12xlarge", cluster=cluster, trials=())


def for_eight() -> Compared:
    """On a mixed cluster of eight devices, without tensor parallelism: as many processes as devices."""
    case = Case("p3.8xlarge + g4dn.12xlarge", Cluster.from_file("p3.8xlarge + g4dn.12xlarge"), Gpt(24, 1024, 16), 32)
    return compare(case.name, case.model(SMPAR), case.global_batch, Constraints(tp=(1,)))


def _cards(model: CostModel) -> bool:
    return len({n.nic.bandwidth for n in model.cluster.nodes}) > 1
