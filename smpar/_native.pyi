from collections.abc import Sequence

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

_Pipeline = tuple[
    Sequence[int],
    Sequence[float],
    Sequence[float],
    Sequence[float],
    Sequence[int],
    Sequence[float],
    Sequence[float],
    Sequence[float],
    Sequence[float],
    float,
    bool,
]
_Graph = tuple[
    int,
    int,
    Sequence[int],
    Sequence[int],
    Sequence[float],
    Sequence[float],
    Sequence[float],
    Sequence[int],
    bool,
    Sequence[tuple[int, int, bool, float, float]],
    float,
]
_Order = list[list[tuple[int, int]]]
_Times = tuple[
    bool,
    list[int],
    float,
    list[float],
    list[float],
    list[float],
    list[float],
    list[int],
    list[int],
    list[float],
    list[float],
]

def named_order(pipeline: _Pipeline, name: str, microbatches: int) -> _Order: ...
def simulate_named(pipeline: _Pipeline, name: str, microbatches: int, record: bool) -> tuple[_Times, _Order]: ...
def simulate(graph: _Graph, actions: _Order, microbatches: int) -> _Times: ...
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
