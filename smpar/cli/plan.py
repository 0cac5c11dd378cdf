"""Find how a model trains fastest on a cluster: degrees, stages, schedule and places; without any GPU.

    smpar plan my_training:build --cluster 'p3.8xlarge*3' --global-batch 64 -o plan.json --html plan.html
    smpar plan --profile profile.json --cluster cluster.yaml --global-batch 64 --fix 'dp=1,pp=2|4'

An entry point takes nothing and returns (model, batch) or (model, batch, step), where step(model, *batch) gives the
loss; the model may be on the meta device. FILE.py:FUNCTION works, too. Its costs are counted from a trace; a profile's
were measured (smpar profile). Ctrl-C ends the search with the best plans so far. Then, under torchrun:
smpar.init("plan.json").
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smpar.advisor import plan
from smpar.cli.output import require_writable
from smpar.describe.page import plans_page
from smpar.describe.plans import show_plans
from smpar.errors import CommandError, NotBuiltYet
from smpar.planner.cluster import ready
from smpar.planner.plans import Plans
from smpar.runtime.plan_file import require_built


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``smpar plan``."""
    parser.add_argument("entry", metavar="MODULE:FUNCTION", nargs="?", help="returns (model, batch[, step])")
    parser.add_argument("--profile", help="file of smpar profile, instead of an entry point")
    parser.add_argument("--cluster", required=True, help=f"file, or ready ones: {', '.join(ready())}; NAME*3+NAME")
    parser.add_argument("--global-batch", required=True, type=int, metavar="N", help="samples of a step")
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=V|V,...",
        help="what is decided: 'pp=2|4,schedule=1f1b'; also tp, dp, microbatch, virtual_stages, devices (how many). "
        "Left out unless named here, as smpar does not run them yet: recompute=none|full, shard_optimizer=false|true",
    )
    parser.add_argument("--keep", type=int, default=10, metavar="N", help="so many plans (%(default)s)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the best plan, for smpar.init")
    parser.add_argument("--html", metavar="FILE", help="write a page with all plans, timetables and memory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Plan; print and write what was asked for."""
    fix = fixed(options.fix)
    if bool(options.entry) == bool(options.profile):
        raise CommandError(
            "a plan is made of an entry point or of a profile",
            "both" if options.entry else "neither",
            "smpar plan my_training:build ..., or smpar plan --profile profile.json ...",
        )
    require_writable("-o", options.output)
    require_writable("--html", options.html)
    source: dict[str, Any] = {"model": options.profile}
    if options.entry:
        from smpar.cli.entry import load  # loads torch, which a profile does not need

        entry = load(options.entry)
        source = {"model": entry.model, "batch": entry.kwargs or entry.args, "step": entry.step}
    plans = plan(**source, cluster=options.cluster, global_batch=options.global_batch, fix=fix, keep=options.keep)
    if options.json:
        print(json.dumps(plans.to_dict()))
    else:
        show_plans(plans)
    _write(plans, options)
    return 0


def _write(plans: Plans, options: argparse.Namespace) -> None:
    if options.output:
        plans.best.save(options.output)
    if options.html:
        Path(options.html).write_text(plans_page(plans))
    written = [path for path in (options.output, options.html) if path]
    if written:
        print(f"written: {', '.join(written)}", file=sys.stderr)
    try:
        require_built(plans.best)
    except NotBuiltYet as unbuilt:
        print(f"note: smpar.init will refuse the best plan: {unbuilt}", file=sys.stderr)


def fixed(given: Sequence[str]) -> dict[str, list[Any]]:
    """``["tp=1,pp=2|4"]`` as ``{"tp": [1], "pp": [2, 4]}``.

    Raises:
        CommandError: it is not written so.
    """
    found: dict[str, list[Any]] = {}
    for part in (part for text in given for part in text.split(",")):
        key, equals, values = part.partition("=")
        if not (key.strip() and equals and values.strip()) or key.strip() in found:
            raise CommandError(
                "--fix takes each key once, with its values", repr(part), "--fix 'tp=1,pp=2|4,schedule=1f1b|zb'"
            )
        found[key.strip()] = [_value(value.strip()) for value in values.split("|")]
    return found


def _value(text: str) -> Any:
    named = {"true": True, "false": False}
    return int(text) if text.lstrip("-").isdecimal() else named.get(text.lower(), text)
