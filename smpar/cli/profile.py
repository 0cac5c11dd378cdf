"""Measure what a model's layers take on this device: seconds of forward and backward by microbatch size, bytes, links.

    smpar profile my_training:build -o profile.json --microbatch-sizes 1,2,4

The model is a real one, not on the meta device. Where several processes will share the machine, start it as often
(torchrun --nproc-per-node N -m smpar profile ...): all measure at the same time, and the first one writes the file.
For a mixed cluster measure on each type of device, and put the entries of all the files' "times" into one file's list.
See smpar.planner.profile for what is in it.
"""

from __future__ import annotations

import argparse
import os

import torch

from smpar.cli.entry import HELP, load
from smpar.cli.output import require_writable
from smpar.errors import CommandError
from smpar.observe.progress import Progress
from smpar.planner.profile import Profile
from smpar.probe.model import profile_model


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``smpar profile``."""
    parser.epilog = HELP
    parser.add_argument("entry", metavar="MODULE:FUNCTION", help="builds the model and a batch")
    parser.add_argument("-o", "--output", default="profile.json", help="file to write (%(default)s)")
    parser.add_argument("--microbatch-sizes", default="1,2,4", metavar="N,N,...", help="samples (%(default)s)")
    parser.add_argument(
        "--tensor-parallel",
        default="1",
        metavar="N,N,...",
        help="degrees at which a model marked for it (smpar.set_tensor_parallelism) is measured (%(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (the GPU if there is one)")
    parser.add_argument("--threads", type=int, help="of torch on a CPU, as training will have")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the file on the first process."""
    sizes = _numbers(options.microbatch_sizes, "microbatch sizes", "--microbatch-sizes")
    degrees = _numbers(options.tensor_parallel, "tensor-parallel degrees", "--tensor-parallel")
    if options.threads:
        torch.set_num_threads(options.threads)
    first = int(os.environ.get("RANK", 0)) == 0
    if first:
        require_writable("-o", options.output)
    device = torch.device(options.device or _default_device())
    entry = load(options.entry)
    with Progress("profiling", "microbatch sizes done", shown=first) as progress:
        profile = profile_model(
            entry.model, entry.args, entry.kwargs, sizes, device, entry.step, progress.advance, degrees
        )
    if first:
        profile.save(options.output)
        print(f"{describe(profile)}\nwritten to {options.output}")
    return 0


def _numbers(text: str, what: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(
            f"{what} are whole numbers with commas between them", repr(text), f"{option} 1,2,4"
        ) from None


def _default_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def describe(profile: Profile) -> str:
    """Lines for a person: the model's sums at each size."""
    parameters = sum(layer.parameters for layer in profile.layers) - sum(
        t.parameters * (len(t.layers) - 1) for t in profile.tied
    )
    lines = [f"{profile.size} layers, {parameters / 1e6:.4g} million parameters, on {profile.times[0].device}"]
    for times in profile.times:
        at = f"tp {times.tp}, " if len(profile.times) > 1 else ""
        for size, *both in zip(times.microbatches, times.forward, times.backward, strict=True):
            forward, backward = (sum(row) * 1e3 for row in both)
            lines.append(f"  {at}{size:g} samples: forward {forward:.4g} ms, backward {backward:.4g} ms")
    if profile.undivided:
        lines.append(f"not divided: {profile.undivided}")
    return "\n".join(lines)
