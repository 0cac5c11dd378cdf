"""More families, each of a kind of its own, over four stages; and random ones, the same for every degree."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.harness import Pool
from tests.parity.family_training import LOSS_TOLERANCE, train
from tests.parity.more_families import MORE, RANDOM
from tests.parity.test_families import check


@pytest.mark.parametrize("name", MORE)
def test_family_trains_as_in_one_process(pool: Pool, name: str) -> None:
    check(pool, name, 4, 4)


@pytest.mark.parametrize("name", RANDOM)
def test_random_family_is_the_same_for_every_degree(pool: Pool, name: str) -> None:
    """Which layers are left out, and what is dropped, follows from the step and the microbatch alone."""
    losses = [pool.run(degree, train, name, degree, 4, {})[0].losses for degree in (1, 2, 4)]
    assert len({round(loss, 3) for loss in losses[0]}) == len(losses[0])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=LOSS_TOLERANCE)
