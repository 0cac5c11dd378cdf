"""Measure the machines of a job: devices, and bandwidth and latency between all pairs of ranks.

Start it as the job will be started, one process for each device:

    torchrun --nproc-per-node 8 -m smpar probe -o cluster.yaml

Without GPUs each process counts as a device of type "cpu". Pairs that share a machine are measured one after the
other, so that they do not slow each other down; then all ranks of two machines send at once, which shows how many
network cards they have. The file is what `smpar plan` reads; see smpar.planner.cluster.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch

from smpar.cli.output import require_writable
from smpar.comm.channels import open_channels
from smpar.comm.messages import CommGroup, allgather, barrier
from smpar.comm.world import World, current
from smpar.observe.progress import Progress
from smpar.planner.cluster import Cluster
from smpar.probe.devices import measure_device
from smpar.probe.links import SIZES, measure_cards, measure_links
from smpar.probe.machines import Rank, cluster_of
from smpar.probe.rounds import rounds
from smpar.runtime.core import init, shutdown

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``smpar probe``."""
    parser.add_argument("-o", "--output", default="cluster.yaml", help="file to write, YAML or .json (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="precision of training, whose matrix products are timed (float32 on CPUs, bfloat16 or float16 on GPUs)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and write the file on rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        require_writable("-o", options.output)
    init({"pipeline_parallel_degree": int(os.environ.get("WORLD_SIZE", 1))})
    try:
        world = current()
        with world.guard():
            cluster = probe(world, DTYPES.get(options.dtype))
        if world.rank == 0:
            cluster.save(options.output)
            print(f"{cluster}\n{describe(cluster)}\nwritten to {options.output}")
    finally:
        shutdown()
    return 0


def probe(world: World, dtype: torch.dtype | None = None, sizes: tuple[int, ...] = SIZES) -> Cluster:
    """Measure the cluster; all ranks call this together, and get the same.

    Args:
        world: one pipeline of all ranks.
        dtype: of training; None takes what the device has for it.
        sizes: bytes of the messages that are timed.
    """
    barrier()
    device = measure_device(world.device, dtype or _training_dtype(world.device), world.local_size)
    ranks = allgather(Rank(world.instance_id, socket.gethostname(), device), CommGroup.WORLD)
    hosts = [rank.machine for rank in ranks]
    if (channels := open_channels(world, world.device)) is None:
        return cluster_of(ranks, {})
    with Progress("probing links", f"of {len(rounds(hosts))} rounds", shown=world.rank == 0) as progress:
        links = measure_links(world, channels, hosts, progress.advance, sizes)
    return cluster_of(ranks, links, measure_cards(world, channels, hosts, sizes[-1]))


def _training_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def describe(cluster: Cluster) -> str:
    """Lines for a person: devices, then links."""
    lines = [
        f"  {t.name}: {t.memory_bytes / 2**30:.1f} GiB, {t.peak_flops / 1e12:.3g} TFLOP/s, "
        f"{t.memory_bandwidth / 1e9:.3g} GB/s to memory"
        for t in cluster.types
    ]
    if cluster.matrix is not None:
        pairs = [cluster.link(a, b) for a in range(cluster.size) for b in range(cluster.size) if a != b]
        slow, fast = min(p.bandwidth for p in pairs), max(p.bandwidth for p in pairs)
        lines.append(f"  links differ: {slow * 8e-9:.3g} to {fast * 8e-9:.3g} Gbit/s (a matrix)")
        return "\n".join(lines)
    for node in dict.fromkeys(cluster.nodes):
        for where, link in (("in", node.intra), ("out of", node.nic)):
            if link.bandwidth < float("inf"):
                lines.append(f"  {where} {node.name}: {link.bandwidth * 8e-9:.3g} Gbit/s, {link.latency * 1e6:.3g} us")
    return "\n".join(lines)
