def partition(
    time: list[float],
    memory: list[float],
    edges: list[tuple[int, list[int], float]],
    ties: list[tuple[list[int], float]],
    stages: int,
    microbatches: int,
    memory_weight: float,
    memory_limit: float,
    ranks: list[int],
    evenness: float,
) -> tuple[list[int], float, list[float], list[float]] | None: ...
