"""Prediction and execution side by side, as text for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from smpar.emulate.emulation import Emulation, Step, fastest
from smpar.schedule import draw_text


def drawn(emulation: Emulation, step: Step, width: int = 96) -> str:
    """The step's actions to scale, one drawing per replica; replicas of equal times are drawn once.

    Args:
        emulation: what was predicted or executed.
        step: its times.
        width: columns for the whole time.
    """
    parts, shown = [], set()
    for replica, (pipeline, order, timeline) in enumerate(
        zip(emulation.pipelines, emulation.orders, step.actions, strict=True)
    ):
        if pipeline not in shown:
            head = [f"replica {replica}"] if emulation.replicas > 1 else []
            parts += [*head, draw_text(order, pipeline.program, width, timeline=timeline)]
            shown.add(pipeline)
    return "\n".join(parts)


def compared(prediction: Step, steps: Sequence[Step]) -> str:
    """When each rank is done, predicted and executed, in the fastest of the steps.

    ::

                         predicted    executed
        rank 0             0.32 s    0.3201 s  +0.0 %
        rank 1             0.29 s    0.2902 s  +0.1 %
        step               0.32 s    0.3201 s  +0.0 %      others: +0.3 % +1.2 %
    """
    best = fastest(steps)
    rows = [f"{'':16} {'predicted':>11} {'executed':>11}"]
    for replica, (predicted, executed) in enumerate(zip(prediction.ends, best.ends, strict=True)):
        of = f"replica {replica} " if len(prediction.ends) > 1 else ""
        pairs = zip(predicted, executed, strict=True)
        rows += [_row(f"{of}rank {rank}", one, other) for rank, (one, other) in enumerate(pairs)]
    others = " ".join(_off(prediction.seconds, step.seconds) for step in steps if step is not best)
    rows.append(_row("step", prediction.seconds, best.seconds) + (f"      others: {others}" if others else ""))
    return "\n".join(rows)


def _row(name: str, predicted: float, executed: float) -> str:
    return f"{name:16} {predicted:9.4g} s {executed:9.4g} s  {_off(predicted, executed)}"


def _off(predicted: float, executed: float) -> str:
    return f"{100 * (executed / predicted - 1):+.1f} %" if predicted else "-"
