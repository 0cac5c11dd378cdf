"""Memory is used again once nobody holds it, whoever that is, and no more is kept than a step takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from smpar.comm.buffers import LEAST, BufferPool

ROWS, COLUMNS = 512, LEAST // 4 // 512
CPU = torch.device("cpu")


def take(pool: BufferPool, columns: int = COLUMNS, fill: float = 0.0) -> torch.Tensor:
    return pool.take((ROWS, columns), (columns, 1), torch.float32, CPU).fill_(fill)


def test_what_is_let_go_comes_again() -> None:
    pool = BufferPool()
    first = take(pool)
    place = first.data_ptr()
    del first
    assert take(pool).data_ptr() == place and pool.held == LEAST


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[3:5, ::2],
        lambda t: t.detach(),
        lambda t: t.view(torch.uint8),
        lambda t: t.requires_grad_().square(),  # saved in a graph
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
    ],
    ids=["itself", "view", "detached", "bytes", "graph", "storage", "numpy"],
)
def test_whoever_holds_it_keeps_it(hold: Callable[[torch.Tensor], Any]) -> None:
    pool = BufferPool()
    tensor = take(pool, fill=1.0)
    place, held = tensor.data_ptr(), hold(tensor)
    del tensor
    other = take(pool, fill=2.0)
    assert other.data_ptr() != place
    del held
    again = take(pool, fill=3.0)
    assert again.data_ptr() == place and pool.held == 2 * LEAST
    assert float(other.mean()) == 2.0


def test_a_graph_over_old_memory_does_not_count_the_new_writes(seed: int) -> None:
    """Two tensors of one block, one after the other, are strangers to autograd."""
    pool = BufferPool()
    x = take(pool, fill=3.0).requires_grad_()
    writes = x._version
    x.square().sum().backward()
    assert x.grad is not None and float(x.grad.mean()) == 6.0
    del x
    y = take(pool, fill=4.0)
    assert not y.requires_grad and y.grad is None and y._version == writes


def test_shapes_types_and_strides_share_blocks_of_their_size() -> None:
    pool = BufferPool()
    place = take(pool).data_ptr()
    across = pool.take((ROWS, COLUMNS), (1, ROWS), torch.float32, CPU)
    assert across.data_ptr() == place and across.stride() == (1, ROWS) and across.shape == (ROWS, COLUMNS)
    del across
    wide = pool.take((ROWS, COLUMNS // 2), (COLUMNS // 2, 1), torch.float64, CPU)
    assert wide.data_ptr() == place and wide.dtype == torch.float64


def test_small_memory_is_not_kept() -> None:
    pool = BufferPool()
    assert pool.take((3, 0, 5), (5, 5, 1), torch.float32, CPU).numel() == 0
    assert pool.take((), (), torch.int64, CPU).shape == ()
    assert pool.take((LEAST - 1,), (1,), torch.uint8, CPU).numel() == LEAST - 1
    assert pool.held == 0


def test_steps_of_changing_sizes_do_not_grow(seed: int) -> None:
    """Random sizes and lifetimes: never two owners of one memory, and after a step only what it used is held."""
    draw, pool = random.Random(seed), BufferPool()
    for _ in range(20):
        sizes = [COLUMNS * draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        alive: list[tuple[float, torch.Tensor]] = []
        for number in range(12):
            alive.append((float(number), take(pool, draw.choice(sizes), number)))
            if len(alive) > 3:
                alive.pop(draw.randrange(4))
            assert all(float(t[0, 0]) == n == float(t[-1, -1]) for n, t in alive)
        del alive
        pool.trim()
        assert pool.held <= 4 * sum(4 * ROWS * c for c in set(sizes))
    pool.trim()
    pool.trim()
    assert pool.held == 0
