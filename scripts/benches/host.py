"""Where the microseconds of smpar's own Python go: a static program of a tiny model, on two processes.

The same step runs for ``--seconds`` while a sampler looks at the main thread's stack. Printed for each rank, in
microseconds of the thread's processor time per microbatch: first the sums, then the tree of smpar's functions, with all
below them and on their own. What they call outside of smpar (torch, the interpreter) counts as theirs, except:

    modules    the units' own forwards, on plain tensors
    watched    the same, where each operation goes through smpar's watch for random draws; that watch included
    autograd   the engine, in the backward of a segment
    script     the step function and the forwards of split modules: the user's Python, which runs on every rank
    waiting    for the other rank: going to sleep and waking up

    host_us = mean over the ranks of all the rest: what smpar takes, per microbatch
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch

import smpar as smp
from benches._chains import even_cuts, gpt, token_batch
from benches._common import finish, on_two_ranks, parser
from benches._ours import ours
from benches._paired import quiet
from benches._rival import MATCHES
from benches._sampler import Node, Sampler, hold_signals, lines_of, smpar_path, tree_of

APART = ("(modules)", "(watched)", "(autograd)", "(script)", "(waiting)")
COMPUTING = frozenset({"whole", "of_inputs", "of_weights"})  # of smpar.runtime.backward
WAITING = frozenset({"_wait", "_gather"})


def sums(node: Node, name: str) -> float:
    """Seconds under this name, wherever it is in the tree."""
    return sum(child.seconds if key == name else sums(child, name) for key, child in node.below.items())


def worker(args: argparse.Namespace) -> None:
    """One of the two ranks; rank 0 prints."""
    torch.set_num_threads(1)
    hold_signals()
    length, vocabulary = 8, 32
    match = MATCHES[args.schedule]
    make = functools.partial(gpt, args.blocks, args.width, 2, length, vocabulary)
    batch = token_batch(args.microbatches, length, vocabulary, seed=0)
    torch.manual_seed(0)
    with ours(make, even_cuts(make(), 2 * match.virtual), match.config, args.microbatches) as mine, quiet():
        for _ in range(20):
            mine.step(*batch)
        start = time.perf_counter()
        for _ in range(50):
            mine.step(*batch)
        steps = max(50, round(args.seconds * 50 / (time.perf_counter() - start)))
        steps = smp.broadcast(steps, smp.WORLD, src=0)
        with Sampler(smpar_path(Path(smp.__file__).parent, COMPUTING, WAITING)) as seen:
            for _ in range(steps):
                mine.step(*batch)
        tree, scale = tree_of(seen.seconds), 1e6 / (steps * args.microbatches)
        parts = {name.strip("()"): sums(tree, name) * scale for name in APART}
        parts["smpar"] = tree.seconds * scale - sum(parts.values())
        lines = lines_of(tree, scale, args.least)
        every = smp.allgather((parts, lines, seen.samples), smp.WORLD)
        if smp.rank() == 0:
            print(f"{args.schedule}, {args.microbatches} microbatches, {args.blocks + 2} units, {steps} steps")
            for rank, (shares, rows, samples) in enumerate(every):
                told = ", ".join(f"{name} {us:.0f}" for name, us in shares.items())
                print(f"\nrank {rank}: us per microbatch: {told} ({samples} samples)\n   below     own")
                print("\n".join(rows), flush=True)
            means = {name: sum(shares[name] for shares, _, _ in every) / len(every) for name in parts}
            finish({"host_us": means["smpar"], "us": means}, args.json)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--schedule", choices=tuple(MATCHES), default="1f1b")
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--blocks", type=int, default=8, help="transformer blocks; each is a unit")
    arguments.add_argument("--width", type=int, default=16)
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--least", type=float, default=2.0, help="microseconds from which a function is shown")
    arguments.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if not args.is_worker:
        on_two_ranks("host")
    worker(args)


if __name__ == "__main__":
    main()
