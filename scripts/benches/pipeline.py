"""smpar against torch.distributed.pipelining: the same GPT, boundaries, microbatches and schedules, step by step.

Two single-threaded processes. For each schedule and number of microbatches the losses and gradients of both are
compared first; then steps of smpar, of torch and of the computations alone alternate, started by both ranks at one
moment; a step lasts until the slower rank has ended. Between blocks one process runs a step. Only forwards and
backwards are timed: gradients are dropped between steps, and garbage is collected between blocks, alike for both.
The batch is the same everywhere.

    ratio             torch's seconds / smpar's, the median over pairs of neighbouring steps
    best_vs_best      the same of the fastest combination of each, at equal work
    bound_fraction    bound / smpar's seconds; the bound is the larger rank's own computation, both ranks busy, times
                      what the schedule leaves idle with the measured costs of the stages
    speedup           the best over all: one process with all layers (the other idle) / smpar
    auto_vs_equal     layers in equal numbers by hand / smpar's own partition: a GPT whose vocabulary head is half the
                      work, and a convolutional front with a transformer behind it
    peak_memory_ratio smpar's peak of live tensor bytes / torch's, 1F1B with 8 microbatches, the larger of both ranks;
                      parameters and their gradients are not counted
    zb_vs_1f1b        smpar's 1F1B / its zero-bubble schedule, 8 microbatches, in alternating blocks

Intervals hold 95 %, by resampling pairs. A schedule that this version of smpar lacks is reported and left out; figures
that need it are then missing from the last line.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benches._bound import Alone, bubble_factor, everyones
from benches._chains import (
    Chain,
    conv_transformer,
    even_cuts,
    gpt,
    image_batch,
    loss_of,
    stage_of_layer,
    token_batch,
)
from benches._common import finish, on_two_ranks, parser
from benches._ours import Ours, ours, why_missing
from benches._paired import Ratio, Spread, alternate, slowest
from benches._peak import check_peak_bytes, peak_bytes
from benches._rival import MATCHES, Match, Rival

ROUNDS = 6  # of a block: between blocks garbage is collected
WARM = 2  # rounds that are not counted
EIGHT = 8  # microbatches of the parts beside the table
CLOSE = 1e-4  # relative distance of gradients
Batch = tuple[Tensor, Tensor]


def say(text: str) -> None:
    """Rank 0 says it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def drop_gradients(*models: nn.Module) -> None:
    for model in models:
        for p in model.parameters():
            p.grad = None


@dataclass(frozen=True)
class Cell:
    """What was measured of one schedule and one number of microbatches; seconds of steps, by the slower rank.

    Attributes:
        smpar, torch, bounds: of the same rounds; torch's empty if it lacks the schedule.
        single: of steps of one process, between the blocks.
    """

    name: str
    smpar: list[float]
    torch: list[float]
    bounds: list[float]
    single: list[float]

    @property
    def bound_fraction(self) -> Ratio:
        return Ratio.of(self.bounds, self.smpar)

    @property
    def speedup(self) -> float:
        return statistics.median(self.single) / statistics.median(self.smpar)

    def __str__(self) -> str:
        rows = [f"{self.name}", f"  smpar {Spread.of(self.smpar)}, of its bound {self.bound_fraction}"]
        if self.torch:
            rows.append(f"  torch {Spread.of(self.torch)}, of its bound {Ratio.of(self.bounds, self.torch)}")
            rows.append(f"  ratio torch / smpar {Ratio.of(self.torch, self.smpar)}")
        rows.append(f"  one process {Spread.of(self.single)}, {self.speedup:.2f} times smpar's")
        return "\n".join(rows)


@dataclass(frozen=True)
class Task:
    """A model, made anew and equal each time, and its batch."""

    make: Callable[[], Chain]
    batch: Batch

    def seeded(self) -> Chain:
        torch.manual_seed(0)
        return self.make()


@dataclass
class Found:
    """Figures of the last line, as far as they are known."""

    ratio: dict[str, float] = field(default_factory=dict)
    bound_fraction: dict[str, float] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        order = ("best_vs_best", "bound_fraction", "speedup", "auto_vs_equal", "peak_memory_ratio", "zb_vs_1f1b")
        every = {"bound_fraction": self.bound_fraction, **self.others}
        return {"ratio": self.ratio, **{name: every[name] for name in order if every.get(name)}}


# -- both do the same ---------------------------------------------------------------------------------------------


def check_parity(mine: Ours, rival: Rival, batch: Batch, cuts: Sequence[int]) -> None:
    """Compare one step's loss and gradients.

    Raises:
        RuntimeError: they differ.
    """
    drop_gradients(mine.model, *rival.parts.values())
    loss, losses = float(mine.step(*batch)), rival.step(*batch)
    theirs = float(torch.stack(losses).detach().sum()) if losses else loss  # else another rank has them
    if not abs(loss - theirs) <= CLOSE * abs(theirs):
        raise RuntimeError(f"losses differ: {loss} with smpar, {theirs} with torch")
    for stage, part in rival.parts.items():
        for i, layer in enumerate(part.layers):
            own = dict(mine.layers[cuts[stage] + i].named_parameters())
            for name, p in layer.named_parameters():
                here, there = own[name].grad, p.grad
                if here is None or there is None or not (here - there).norm() <= CLOSE * there.norm() + 1e-9:
                    raise RuntimeError(f"gradients of {name} in layer {cuts[stage] + i} differ")


def rival_of(match: Match, task: Task, cuts: Sequence[int], microbatches: int) -> Rival | None:
    """torch's side; None, with the reason said, if torch does not take the schedule."""
    try:
        return Rival(match, task.seeded(), cuts, microbatches)
    except (ValueError, AssertionError) as error:
        say(f"torch refuses: {error}")
        return None


def alone_of(mine: Ours, match: Match, task: Task, cuts: Sequence[int], microbatches: int) -> Alone:
    """This rank's computations, in the order in which smpar's last step ran them."""
    schedule, program = mine.timetable
    model, rank = task.seeded(), dist.get_rank()
    x, target = (t.chunk(microbatches)[0] for t in task.batch)
    inputs, parts = {}, {}
    with torch.no_grad():
        for stage in range(len(cuts) - 1):
            part = model.part(cuts[stage], cuts[stage + 1])
            if match.placed(stage, dist.get_world_size()) == rank:
                inputs[stage], parts[stage] = x, part
            x = part(x)
    return Alone(parts, inputs, target, schedule.ranks[rank], tuple(s.stage for s in program.segments))


def whole_step(model: Chain, batch: Batch, microbatches: int) -> None:
    """One process, all layers, microbatch by microbatch."""
    for x, target in zip(*(t.chunk(microbatches) for t in batch), strict=True):
        (loss_of(model(x), target) / microbatches).backward()


# -- measuring ----------------------------------------------------------------------------------------------------


def measure(name: str, match: Match, task: Task, microbatches: int, pairs: int) -> Cell:
    """One schedule with one number of microbatches."""
    cuts = even_cuts(task.seeded(), 2 * match.virtual)
    with ours(task.seeded, cuts, match.config, microbatches) as mine:
        rival = rival_of(match, task, cuts, microbatches)
        mine.step(*task.batch)
        if rival is not None:
            rival.step(*task.batch)
            check_parity(mine, rival, task.batch, cuts)
        alone, whole = alone_of(mine, match, task, cuts, microbatches), task.seeded()
        first = dist.get_rank() == 0
        ways: dict[str, Callable[[], object]] = {"smpar": lambda: mine.step(*task.batch)}
        if rival is not None:
            ways["torch"] = lambda: rival.step(*task.batch)
        ways["alone"] = alone
        asides = {"single": lambda: whole_step(whole, task.batch, microbatches) if first else None}
        models = [mine.model, *alone.parts.values(), whole, *(rival.parts.values() if rival else ())]
        clear = functools.partial(drop_gradients, *models)

        alternate(ways, WARM, clear)
        taken: dict[str, list[float]] = {way: [] for way in (*ways, *asides)}
        for number in range(0, pairs, ROUNDS):
            block = alternate(ways, min(ROUNDS, pairs - number), clear, number)
            for way, values in (block | alternate(asides, 1, clear)).items():
                taken[way] += values
        costs = everyones(alone.costs(alone.input_seconds(5)))
        factor = bubble_factor(*mine.timetable, costs)
        slow = {way: slowest(values) for way, values in taken.items()}
        bounds = [factor * seconds for seconds in slow["alone"]]
        return Cell(f"{name}_m{microbatches}", slow["smpar"], slow.get("torch", []), bounds, slow["single"])


def best_against_best(cells: Sequence[Cell], task: Task, pairs: int) -> Ratio:
    """The fastest combination of each, once more, in turn."""
    mine_at = min(cells, key=lambda cell: statistics.median(cell.smpar))
    theirs_at = min((c for c in cells if c.torch), key=lambda cell: statistics.median(cell.torch))
    match, microbatches = MATCHES[mine_at.name.rpartition("_m")[0]], int(mine_at.name.rpartition("_m")[2])
    other, others = MATCHES[theirs_at.name.rpartition("_m")[0]], int(theirs_at.name.rpartition("_m")[2])
    model = task.seeded()
    rival = Rival(other, model, even_cuts(model, 2 * other.virtual), others)
    with ours(task.seeded, even_cuts(model, 2 * match.virtual), match.config, microbatches) as mine:
        clear = functools.partial(drop_gradients, mine.model, *rival.parts.values())
        ways = {"smpar": lambda: mine.step(*task.batch), "torch": lambda: rival.step(*task.batch)}
        alternate(ways, WARM, clear)
        taken = alternate(ways, pairs, clear)
        ratio = Ratio.of(slowest(taken["torch"]), slowest(taken["smpar"]))
    say(f"best against best: torch {theirs_at.name}, smpar {mine_at.name}: ratio {ratio}")
    return ratio


@dataclass(frozen=True)
class Setup:
    """One of two configurations of smpar that are compared in blocks."""

    cuts: tuple[int, ...] | None
    keys: Mapping[str, Any]


def in_blocks(above: Setup, below: Setup, task: Task, microbatches: int, blocks: int, steps: int) -> Ratio:
    """Seconds of ``above`` over those of ``below``, from medians of neighbouring blocks; smpar starts anew for each."""
    medians: dict[str, list[float]] = {"above": [], "below": []}
    setups = {"above": above, "below": below}
    for block in range(blocks):
        for which in ("above", "below") if block % 2 else ("below", "above"):
            setup = setups[which]
            with ours(task.seeded, setup.cuts, setup.keys, microbatches) as mine:
                clear = functools.partial(drop_gradients, mine.model)
                way = {which: lambda: mine.step(*task.batch)}
                alternate(way, WARM, clear)
                medians[which].append(statistics.median(slowest(alternate(way, steps, clear)[which])))
                if block == 0 and setup.cuts is None:
                    say(f"  smpar's partition: stage of each layer {mine.layer_stages}")
            gc.collect()
    return Ratio.of(medians["above"], medians["below"])


def peak_memory(name: str, match: Match, task: Task, microbatches: int) -> float:
    """smpar's peak over torch's: the larger ratio of both ranks."""
    cuts = even_cuts(task.seeded(), 2 * match.virtual)
    model = task.seeded()
    for p in model.parameters():  # what is there before is not counted
        p.grad = torch.zeros_like(p)
    rivals: list[Rival] = []

    def with_torch() -> None:
        rivals.append(Rival(match, model, cuts, microbatches))  # its buffers count, too
        for _ in range(3):
            rivals[0].step(*task.batch)

    with ours(task.seeded, cuts, match.config, microbatches) as mine:
        for p in mine.model.parameters():
            p.grad = torch.zeros_like(p)

        def with_smpar() -> None:
            for _ in range(3):
                mine.step(*task.batch)

        bytes_ = torch.tensor([float(peak_bytes(with_smpar)), float(peak_bytes(with_torch))])
    every = [torch.empty_like(bytes_) for _ in range(dist.get_world_size())]
    dist.all_gather(every, bytes_)
    shown = ", ".join(f"rank {i}: {a / 1e6:.1f} against {b / 1e6:.1f} MB" for i, (a, b) in enumerate(map(list, every)))
    ratio = max(float(a / b) for a, b in every)
    say(f"peak of live tensors, {name}_m{microbatches}, smpar against torch: {shown}; ratio {ratio:.3f}")
    return ratio


# -- the bench ----------------------------------------------------------------------------------------------------


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, missing = Found(), set()
    for name in args.schedules:
        if why := why_missing(MATCHES[name].config):
            missing.add(name)
            say(f"{name:<20} missing: {why}")
    task = Task(
        lambda: gpt(args.blocks, args.width, args.heads, args.length, args.vocabulary),
        token_batch(args.samples, args.length, args.vocabulary, seed=1),
    )
    built = [name for name in args.schedules if name not in missing]
    if "schedules" in args.parts:
        cells = []
        for name, microbatches in product(built, args.microbatches):
            cell = measure(name, MATCHES[name], task, microbatches, args.pairs)
            cells.append(cell)
            say(str(cell))
            found.bound_fraction[cell.name] = cell.bound_fraction.value
            if cell.torch:
                found.ratio[cell.name] = Ratio.of(cell.torch, cell.smpar).value
        best = max(cells, key=lambda cell: cell.speedup)
        say(f"fastest against one process: {best.name}, {best.speedup:.3f} times")
        found.others["speedup"] = best.speedup
        if any(cell.torch for cell in cells):
            found.others["best_vs_best"] = best_against_best(cells, task, args.pairs).value
    if "partition" in args.parts:
        found.others["auto_vs_equal"] = compare_partitions(args)
    if "memory" in args.parts:
        check_peak_bytes()
        ratios = {name: peak_memory(name, MATCHES[name], task, EIGHT) for name in built}
        if "1f1b" in ratios:
            found.others["peak_memory_ratio"] = ratios["1f1b"]
    if "zb" in args.parts and not why_missing(MATCHES["zb"].config):
        cuts = even_cuts(task.seeded(), 2)
        setups = [Setup(cuts, MATCHES[name].config) for name in ("1f1b", "zb")]
        ratio = in_blocks(setups[0], setups[1], task, EIGHT, args.turns, ROUNDS)
        say(f"zero-bubble against 1F1B, 8 microbatches: {ratio}")
        found.others["zb_vs_1f1b"] = ratio.value
    if dist.get_rank() == 0:
        finish(found.figures(), args.json)
    dist.barrier()
    dist.destroy_process_group()


def compare_partitions(args: argparse.Namespace) -> dict[str, float]:
    """Layers in equal numbers against smpar's own partition, on models on which that is a bad choice."""
    width, vocabulary = 128, 12288  # a block's 12 width^2 times 8 are the head's width times vocabulary
    tasks = {
        "head": Task(lambda: gpt(8, width, 4, 32, vocabulary), token_batch(args.samples, 32, vocabulary, seed=2)),
        "conv": Task(lambda: conv_transformer(4, 8, width, 4, 100), image_batch(args.samples, 100, seed=3)),
    }
    result = {}
    for name, task in tasks.items():
        cuts = even_cuts(task.seeded(), 2)
        say(f"partition, {name}: by hand {stage_of_layer(cuts)}")
        keys = MATCHES["1f1b"].config
        ratio = in_blocks(Setup(cuts, keys), Setup(None, keys), task, EIGHT, args.turns, ROUNDS)
        say(f"partition, {name}: equal layers against smpar's own: {ratio}")
        result[name] = ratio.value
    return result


PARTS = ("schedules", "partition", "memory", "zb")


def listed(kind: Callable[[str], Any], choices: Sequence[Any] = ()) -> Callable[[str], list[Any]]:
    """An argument's values, separated by commas."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",")]
        if choices and (wrong := [v for v in values if v not in choices]):
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(map(str, choices))}")
        return values

    return parse


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--schedules", type=listed(str, tuple(MATCHES)), default=list(MATCHES))
    arguments.add_argument("--microbatches", type=listed(int), default=[4, 8, 16])
    arguments.add_argument("--parts", type=listed(str, PARTS), default=list(PARTS), help=",".join(PARTS))
    arguments.add_argument("--pairs", type=int, default=18, help="pairs of steps for a ratio, at least 15 to mean much")
    arguments.add_argument("--turns", type=int, default=6, help="pairs of blocks, where smpar starts anew for each")
    arguments.add_argument("--quick", action="store_true", help="a check in under a minute: the figures mean little")
    arguments.add_argument("--blocks", type=int, default=8, help="transformer blocks of the GPT")
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--heads", type=int, default=8)
    arguments.add_argument("--length", type=int, default=128)
    arguments.add_argument("--vocabulary", type=int, default=256)
    arguments.add_argument("--samples", type=int, default=16, help="of the whole batch")
    arguments.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.samples < (most := max(*args.microbatches, EIGHT)):
        arguments.error(f"--samples must be at least the largest number of microbatches, {most}; got {args.samples}")
    if args.quick:
        args.microbatches, args.pairs, args.turns, args.width, args.length = [4], 3, 1, 96, 32
    if not args.is_worker:
        on_two_ranks("pipeline")
    worker(args)


if __name__ == "__main__":
    main()
