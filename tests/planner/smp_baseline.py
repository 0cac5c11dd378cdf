"""Random module trees for SMP's partition algorithm."""

from __future__ import annotations

import random

from smpar.planner.smp_tree import Tree


def random_tree(rng: random.Random, depth: int = 3) -> Tree:
    """Up to `depth` levels of one to four children."""
    if depth == 0 or rng.random() < 0.2:
        return Tree(rng.choice((0.1, 1.0, 1.0, 5.0)) * rng.random())
    children = tuple(random_tree(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    return Tree(sum(child.cost for child in children), children)


def leaf_costs(node: Tree) -> list[float]:
    """Of the units, in execution order."""
    return [cost for child in node.children for cost in leaf_costs(child)] if node.children else [node.cost]
