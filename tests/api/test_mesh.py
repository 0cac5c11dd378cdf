"""The mesh against brute force: write the ranks into an array in placement order and read the groups off it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from smpar.errors import MeshError
from smpar.mesh import AXES, Coords, Mesh

PERMUTATIONS = ["".join(p) for p in itertools.permutations("DPT")]
MOVES = {"world": "DPT", "pp": "P", "tp": "T", "rdp": "D", "mp": "PT", "dp": "DT"}


def brute_force_groups(pp: int, tp: int, rdp: int, placement: str, axis: str) -> set[tuple[int, ...]]:
    degrees = {"P": pp, "T": tp, "D": rdp}
    ranks = np.arange(pp * tp * rdp).reshape([degrees[letter] for letter in placement])
    moving = [i for i, letter in enumerate(placement) if letter in MOVES[axis]]
    fixed = [i for i in range(3) if i not in moving]
    rows = ranks.transpose(fixed + moving).reshape(-1, int(np.prod([ranks.shape[i] for i in moving])))
    return {tuple(sorted(int(r) for r in row)) for row in rows}


@pytest.mark.parametrize("placement", PERMUTATIONS)
def test_groups_and_coordinates_equal_brute_force(placement: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(8):
        pp, tp, rdp = (draw.randint(1, 4) for _ in range(3))
        mesh = Mesh(pp * tp * rdp, pp, tp, placement)
        assert mesh.rdp == rdp
        for axis in AXES:
            expected = brute_force_groups(pp, tp, rdp, placement, axis)
            assert set(mesh.groups(axis)) == expected, (mesh, axis)
            for rank in range(mesh.world_size):
                group = mesh.group(axis, rank)
                assert rank in group and group in expected
                assert group[mesh.index(axis, rank)] == rank
        for rank in range(mesh.world_size):
            at = mesh.coords(rank)
            assert mesh.rank(at.pp, at.rdp, at.tp) == rank
            assert (mesh.index("pp", rank), mesh.index("rdp", rank), mesh.index("tp", rank)) == at


def test_an_order_puts_any_rank_at_any_place() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(20):
        pp, tp, rdp = (draw.randint(1, 4) for _ in range(3))
        order = draw.sample(range(pp * tp * rdp), pp * tp * rdp)
        mesh, plain = Mesh(len(order), pp, tp, order=tuple(order)), Mesh(len(order), pp, tp, "PDT")
        for rank in range(mesh.world_size):
            assert mesh.coords(order[rank]) == plain.coords(rank)
            at = mesh.coords(rank)
            assert mesh.rank(at.pp, at.rdp, at.tp) == rank
            assert (mesh.index("pp", rank), mesh.index("rdp", rank), mesh.index("tp", rank)) == at
            for axis in AXES:
                assert set(mesh.group(axis, order[rank])) == {order[i] for i in plain.group(axis, rank)}
        assert mesh.group("world", 0) == tuple(range(mesh.world_size))


def test_drawing_of_the_module_docstring() -> None:
    cluster, spread = Mesh(8, pp=2, tp=2, placement="cluster"), Mesh(8, pp=2, tp=2, placement="spread")

    def draw(mesh: Mesh) -> list[list[int]]:
        return [[mesh.rank(p, d, t) for p in range(2) for t in range(2)] for d in range(2)]

    assert draw(cluster) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert draw(spread) == [[0, 4, 2, 6], [1, 5, 3, 7]]
    assert cluster.coords(5) == Coords(pp=0, rdp=1, tp=1)
    swapped = Mesh(4, pp=2, order=(2, 3, 0, 1))
    assert [[swapped.rank(p, d) for p in range(2)] for d in range(2)] == [[2, 0], [3, 1]]
    assert (swapped.group("pp", 0), swapped.group("rdp", 0)) == ((2, 0), (0, 1))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((6, 4, 1), "divide"),
        ((8, 3, 2), "divide"),
        ((4, 0, 1), "at least 1"),
        ((4, 1, 1, "DDT"), "placement"),
        ((4, 1, 1, "near"), "placement"),
        ((4, 1, 1, "DPT", (0, 1, 2, 2)), "each of them once"),
        ((4, 1, 1, "DPT", (0, 1, 2)), "each of them once"),
    ],
)
def test_what_does_not_fit_is_an_error(arguments: tuple[Any, ...], word: str) -> None:
    with pytest.raises(MeshError, match=word):
        Mesh(*arguments)


def test_the_fix_of_a_world_that_does_not_divide_works() -> None:
    with pytest.raises(MeshError, match="start 8 ranks"):
        Mesh(7, pp=4, tp=1)
    Mesh(8, pp=4, tp=1)


def test_ranks_outside_the_world_are_errors() -> None:
    mesh = Mesh(4, pp=2)
    for rank in (-1, 4):
        with pytest.raises(MeshError, match="rank"):
            mesh.coords(rank)
    with pytest.raises(MeshError, match="coordinate"):
        mesh.rank(pp=2)
