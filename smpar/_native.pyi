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
def cut_stages(
    times: list[list[float]],
    state: list[float],
    saved: list[float],
    tensors: list[tuple[int, list[int], float]],
    places: list[tuple[int, float, float, float, float, float]],
    microbatches: int,
) -> tuple[list[int], float, list[float], list[float]] | None: ...
def least_excess(
    times: list[list[float]],
    state: list[float],
    saved: list[float],
    tensors: list[tuple[int, list[int], float]],
    places: list[tuple[int, float, float, float, float, float]],
) -> tuple[list[int], int, float]: ...
def cut_shared(
    times: list[list[float]],
    state: list[float],
    saved: list[float],
    tensors: list[tuple[int, list[int], float]],
    places: list[tuple[int, float, float, float, float, float]],
    microbatches: int,
    ranks: list[int],
    evenness: float,
) -> tuple[tuple[list[int], float, list[float], list[float]], bool]: ...
