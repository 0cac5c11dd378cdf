"""Plans as one page of HTML that needs nothing else: why, when, where, and what fills the memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from smpar.describe.charts import Span, bars, frontier_svg, key, timetable_svg
from smpar.describe.numbers import count, duration, memory, percent
from smpar.describe.page_style import CSS
from smpar.describe.plans import devices_of, filled, fullest, layers_of, of_strategy, searched, undivided
from smpar.errors import PlanError
from smpar.planner.cost import CostModel
from smpar.planner.parts import Memory
from smpar.planner.pipeline import Timeline
from smpar.planner.plans import Plan, Plans, parts

_DRAWN = 1024  # devices of a cluster that is drawn for every plan; larger ones only for the best

_CAUSES = {
    "computing": "computing, spread evenly",
    "balance": "more on the busiest rank",
    "waiting": "bubble and transfers",
    "reduction": "reducing gradients",
    "optimizer": "optimizer and the rest",
}
_MEMORY = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer-state": "optimizer",
    "activations": "activations of microbatches in flight",
    "working": "working memory of a layer",
}


def plans_page(plans: Plans) -> str:
    """The page.

    Args:
        plans: with the model that predicted them.

    Raises:
        PlanError: they come without it.
    """
    if plans.model is None:
        raise PlanError(
            "a page is drawn of plans that know their cost model", "plans without", "use what smpar.plan returns"
        )
    model = plans.model
    title = f"Plan for {model.cluster}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>",
            *_summary(plans, model),
            *_comparison(plans, model),
            "<h2>Each plan</h2>",
            *(line for number, plan in enumerate(plans, 1) for line in _plan(number, plan, model)),
            *_frontier(plans),
            *_model(model),
            "</main></body></html>",
            "",
        ]
    )


def _summary(plans: Plans, model: CostModel) -> Iterable[str]:
    best = plans.best
    s, p = best.strategy, best.prediction
    used, whole = len(s.devices), model.cluster.size
    yield f"<h1>Best plan: {escape(str(s))}</h1>"
    yield (
        f"<p>This is the fastest way found to train {s.global_batch} samples per step of a model of "
        f"{model.profile.size} layers on {escape(str(model.cluster))}. {_degrees_in_words(best)}</p>"
    )
    facts = [
        (duration(p.seconds), "per step"),
        (count(best.samples_per_second), "samples per second"),
        (f"{used} of {whole}", "devices used"),
        (percent(p.bubble, 1.0), "bubble: idle time of the pipeline"),
        (fullest(best), "on the fullest device"),
    ]
    yield '<div class="facts">' + "".join(f"<div><b>{escape(a)}</b><span>{b}</span></div>" for a, b in facts) + "</div>"
    if used < whole:
        yield f"<p>{whole - used} devices are left out: with them a step would not be faster.</p>"
    if len(plans) > 1 and plans[1].why:
        yield f"<p>The next best plan, {escape(str(plans[1].strategy))}, is slower: {escape(plans[1].why)}.</p>"
    for line in (searched(plans), *undivided(plans)):
        yield f'<p class="soft">{escape(line)}.</p>'


def _degrees_in_words(plan: Plan) -> str:
    s = plan.strategy
    words = []
    if s.pp > 1:
        stages = (
            f"{s.stages} stages" if s.virtual_stages == 1 else f"{s.stages} stages, {s.virtual_stages} on each rank"
        )
        words.append(
            f"The model is cut into a pipeline of {s.pp} ranks ({stages}), which runs the schedule {s.schedule}"
        )
    if s.dp > 1:
        words.append(f"{s.dp} replicas share the batch" if words else f"{s.dp} replicas of the model share the batch")
    if s.tp > 1:
        words.append(f"each layer is divided among {s.tp} devices")
    whose = "a step of each replica" if s.dp > 1 else "a step"
    samples = "1 sample" if s.microbatch == 1 else f"{s.microbatch} samples"
    microbatches = f"{whose} has {s.microbatches} microbatches of {samples}"
    words.append(microbatches if words else f"One device holds the model, and {microbatches}")
    return "; ".join(words) + "."


def _comparison(plans: Plans, model: CostModel) -> Iterable[str]:
    yield "<h2>Where the time goes</h2>"
    slowest = max(plan.prediction.seconds for plan in plans)
    rows = [
        (
            f"{number}. {' · '.join(of_strategy(plan))}",
            list(parts(model, plan).items()),
            duration(plan.prediction.seconds),
        )
        for number, plan in enumerate(plans, 1)
    ]
    yield "<figure>" + bars(rows, slowest) + key((f"c-{c}", words) for c, words in _CAUSES.items())
    yield "<figcaption>Seconds of a step by cause; microbatches as number of size.</figcaption></figure>"
    yield '<div class="wide"><table><thead><tr><th class="n">plan</th><th>degrees</th><th>schedule</th>'
    yield '<th>microbatches</th><th class="n">per step</th><th class="n">samples/s</th><th class="n">bubble</th>'
    yield '<th class="n">fullest device</th><th>against the best</th></tr></thead><tbody>'
    for number, plan in enumerate(plans, 1):
        names = "".join(f'<td class="w">{escape(word)}</td>' for word in of_strategy(plan))
        numbers = (duration(plan.prediction.seconds), count(plan.samples_per_second),
                   percent(plan.prediction.bubble, 1.0), fullest(plan))  # fmt: skip
        cells = "".join(f'<td class="n">{number_}</td>' for number_ in numbers)
        why = escape(plan.why or ("the best" if number == 1 else "as fast"))
        yield f'<tr><td class="n">{number}</td>{names}{cells}<td class="long">{why}</td></tr>'
    yield "</tbody></table></div>"


def _plan(number: int, plan: Plan, model: CostModel) -> Iterable[str]:
    opened = " open" if number == 1 else ""
    s = plan.strategy
    yield f'<details class="plan"{opened}><summary>{number}. {escape(str(s))} '
    yield f"<span>· {duration(plan.prediction.seconds)}</span></summary><div>"
    yield from _timetable(plan, model)
    yield from _stages(plan)
    yield from _memory(plan, model.memory(s))
    if number == 1 or model.cluster.size <= _DRAWN // 4:
        yield from _placement(plan)
    yield "</div></details>"


def _timetable(plan: Plan, model: CostModel) -> Iterable[str]:
    s, p = plan.strategy, plan.prediction
    line = model.timeline(s)
    table = line.timetable
    assert table is not None, "the cost model's timelines have their actions"
    first = {rank: stage for stage, rank in reversed(list(enumerate(s.ranks)))}
    actions, lanes = list(table), _lanes(plan, model, line)
    said = f"Timetable of {s}: {s.pp} ranks, {duration(p.seconds)} per step, bubble {percent(p.bubble, 1.0)}"
    yield "<h3>Timetable of a step</h3>"
    yield '<figure><div class="wide time">' + timetable_svg(actions, lanes, p.seconds, first, said) + "</div>"
    split = any(kind > 1 for kind in table.kind)
    entries = [("k-f", "forward"), ("k-b", "backward of inputs" if split else "backward")]
    entries += [("k-w", "backward of weights")] * split + [("k-r", "reducing gradients")] * any(
        span.colour == "r" for lane in lanes for span in lane
    )
    yield key([*entries, ("k-o", "optimizer"), ("k-idle", "idle")])
    pale = " Paler: further stages of the rank." if s.virtual_stages > 1 else ""
    replica = "The slowest replica. " if s.dp > 1 else ""
    yield f"<figcaption>{replica}Neighbouring microbatches differ in tone.{pale}</figcaption></figure>"


def _lanes(plan: Plan, model: CostModel, line: Timeline) -> list[list[Span]]:
    """Each rank's sums of gradients, tied ones over stages and all over the replicas, then the optimizer's step."""
    s, made = plan.strategy, model.parts(plan.strategy)
    lanes: list[list[Span]] = [[] for _ in range(s.pp)]
    ends, done = list(line.last_backward), [line.seconds] * s.pp
    for stages, seconds in made.tied:
        start = max(ends[stage] for stage in stages)
        for stage in stages:
            ends[stage] = start + seconds
            lanes[s.ranks[stage]].append(Span("r", start, ends[stage]))
    free = [0.0] * s.pp
    for stage in sorted(range(s.stages), key=ends.__getitem__):
        rank, start = s.ranks[stage], max(free[s.ranks[stage]], ends[stage])
        free[rank] = start + made.reductions[stage]
        done[rank] = max(done[rank], free[rank])
        lanes[rank].append(Span("r", start, free[rank]))
    for rank, lane in enumerate(lanes):
        lane.append(Span("o", done[rank], done[rank] + made.steps[rank]))
    return [[span for span in lane if span.start < span.end] for lane in lanes]


def _stages(plan: Plan) -> Iterable[str]:
    s, p = plan.strategy, plan.prediction
    yield '<h3>Stages</h3><div class="wide"><table><caption>Times are of one microbatch; the reduction comes once a '
    yield 'step.</caption><thead><tr><th class="n">stage</th><th class="n">rank</th><th>layers</th><th>devices</th>'
    yield '<th class="n">forward</th><th class="n">backward</th><th class="n">receives</th><th class="n">reduction</th>'
    yield "</tr></thead><tbody>"
    for index, (stage, rank) in enumerate(zip(p.stages, s.ranks, strict=True)):
        numbers = [stage.forward, stage.backward, stage.receives, stage.reduction]
        again = " (runs its forward again)" * s.recomputes(index)
        cells = "".join(f'<td class="n">{duration(n)}</td>' for n in numbers)
        yield f'<tr><td class="n">{index}</td><td class="n">{rank}</td><td class="long">'
        yield f"{escape(layers_of(plan, index))}{again}</td><td>{escape(devices_of(plan, rank))}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def _memory(plan: Plan, need: Sequence[Memory]) -> Iterable[str]:
    limits = plan.prediction.limits
    rows = [
        (
            f"rank {rank} on {devices_of(plan, rank)}",
            list(zip(_MEMORY, bytes_, strict=True)),
            filled(bytes_.total, limits[rank]),
        )
        for rank, bytes_ in enumerate(need)
    ]
    yield "<h3>Memory of a device</h3><figure>" + bars(rows, max(limits), limits)
    yield key((f"c-{c}", words) for c, words in _MEMORY.items())
    yield "<figcaption>At its fullest; the line is what the device has.</figcaption></figure>"


def _placement(plan: Plan) -> Iterable[str]:
    s = plan.strategy
    at = {s.place(p, d, t): (p, d, t) for p in range(s.pp) for d in range(s.dp) for t in range(s.tp)}
    yield '<h3>Places</h3><figure><div class="nodes">'
    start = 0
    for index, node in enumerate(plan.cluster.nodes):
        cells = "".join(_cell(device, at.get(device), s.tp) for device in range(start, start + node.count))
        name = f"node {index}: {node.name} ({node.device})"
        yield f'<div class="node"><p>{escape(name)}</p><div class="cells">{cells}</div></div>'
        start += node.count
    shard = ", shard" if s.tp > 1 else ""
    yield f"</div><figcaption>By device: number in the cluster, pipeline rank (colour), replica{shard}.</figcaption>"
    yield "</figure>"


def _cell(device: int, place: tuple[int, int, int] | None, tp: int) -> str:
    if place is None:
        return f'<div class="cell none">{device}<br>unused</div>'
    rank, replica, shard = place
    words = f"p{rank} r{replica}" + (f" t{shard}" if tp > 1 else "")
    hue = round(205 + 137.5 * rank) % 360
    return f'<div class="cell" style="--h:{hue}">{device}<br>{words}</div>'


def _frontier(plans: Plans) -> Iterable[str]:
    yield "<h2>What else was found</h2>"
    if len(plans.frontier) > 1:
        best = min(plans.frontier, key=plans.frontier.__getitem__)
        said = "; ".join(f"{n} devices {duration(seconds)}" for n, seconds in plans.frontier.items())
        yield "<h3>Seconds of a step against the number of devices</h3><figure>"
        yield f'<div style="max-width:560px">{frontier_svg(plans.frontier, said)}</div><figcaption>Dots: the best with '
        yield f"exactly so many; line: with at most so many. The best uses {best}. Numbers of which nothing could be "
        yield "among the best were not looked at.</figcaption></figure>"
    yield '<div class="three">'
    for axis, name in enumerate(("tensor", "pipeline", "data")):
        by: dict[int, float] = {}
        for degrees, seconds in plans.degrees.items():
            by[degrees[axis]] = min(by.get(degrees[axis], float("inf")), seconds)
        if len(by) > 1:
            shown = sorted(sorted(by, key=by.__getitem__)[:12])
            slowest = max(by[degree] for degree in shown)
            rows = [(str(degree), [("plain", by[degree])], duration(by[degree])) for degree in shown]
            yield f"<div><h3>By {name}-parallel degree</h3>{bars(rows, slowest)}</div>"
    yield "</div>"


def _model(model: CostModel) -> Iterable[str]:
    profile = model.profile
    parameters = sum(x.parameters for x in profile.layers)
    parameters -= sum(t.parameters * (len(t.layers) - 1) for t in profile.tied)
    yield "<h2>Made of</h2><p>"
    yield f"{profile.size} layers with {count(parameters)} parameters; device types: "
    yield "; ".join(
        f"{escape(t.name)} with {memory(t.memory_bytes)}, {t.peak_flops / 1e12:.4g} TFLOP/s and "
        f"{t.memory_bandwidth / 1e9:.4g} GB/s"
        for t in model.cluster.types
    )
    yield ". All times are predicted by simulating the schedule that smpar runs.</p>"
