"""A profile: what a file says, the straight lines between measured sizes, and what a wrong file is told."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from smpar.errors import ProfileError
from smpar.planner.profile import Layer, Profile, Tensor, Tied, Times


def given() -> dict[str, Any]:
    """The drawing of `smpar.planner.profile`: four layers in a chain, a skip, one parameter in two of them."""
    return {
        "layers": [{"name": f"l{i}", "parameters": 100 + i, "saved": 40, "whole_saved": 8} for i in range(4)],
        "tensors": [{"source": 0, "targets": [1, 3], "elements": 7},
                    {"source": 1, "targets": [2], "elements": 5, "gradient": False},
                    {"source": 2, "targets": [3], "elements": 6}],
        "tied": [{"layers": [0, 3], "parameters": 60}],
        "times": [{"device": "T4", "tp": 1, "microbatches": [1, 4], "forward": [[1, 2, 3, 4], [4, 5, 6, 7]],
                   "backward": [[2, 2, 2, 2], [8, 8, 8, 8]], "weight": [[1, 1, 1, 1], [2, 2, 2, 2]]},
                  {"device": "T4", "tp": 2, "microbatches": [2], "forward": [[1, 1, 1, 1]],
                   "backward": [[3, 3, 3, 3]]}],
        "divided": [{"tp": 2, "parameters": [60, 50, 50, 50], "whole_parameters": [20, 0, 0, 50],
                     "saved": [20, 20, 20, 40], "transient": [0, 0, 0, 0], "tied": [30], "elements": [7, 2.5, 3],
                     "forward_bytes": [9, 0, 0, 0], "backward_bytes": [18, 0, 0, 0],
                     "forward_calls": [1, 0, 0, 0], "backward_calls": [2, 0, 0, 0]}],
    }  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """`given` with one value put at ``key.key``, or taken away."""
    at: Any = given()
    top, keys = at, [int(k) if k.isdecimal() else k for k in path.split(".")]
    for key in keys[:-1]:
        at = at[key]
    if value is None:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return top


def test_keys_and_defaults() -> None:
    profile = Profile.from_dict(given())
    assert profile.layers[2] == Layer("l2", 102, 40, 0.0, 8, 0.0, 0.0)
    assert profile.tensors[:2] == (Tensor(0, (1, 3), 7), Tensor(1, (2,), 5, gradient=False))
    assert profile.tied == (Tied((0, 3), 60),) and profile.size == 4
    assert profile.devices == ("T4",) and profile.degrees("T4") == (1, 2) and profile.degrees("V100") == ()
    assert profile.times_of("T4", 2).microbatches == (2,)


def test_what_is_known_of_a_degree_is_taken_and_the_rest_divided() -> None:
    """At tp 2 the file says it; at tp 4 the parts that are not whole are divided."""
    profile = Profile.from_dict(given())
    assert profile.at(2) == profile.divided[0]
    four = profile.at(4)
    assert four.parameters == (25.0, 25.25, 25.5, 25.75) and four.saved == (16.0,) * 4
    assert four.tied == (15.0,) and four.elements == (7, 5, 6) and not any(four.forward_calls)


def test_what_is_written_is_read_back(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layers = tuple(
        Layer(f"h.{i}", rng.uniform(50, 99), 40.0, rng.uniform(0, 50), 8.5, rng.random(), rng.random())
        for i in range(rng.randint(1, 6))
    )
    rows = tuple(tuple(rng.random() for _ in layers) for _ in range(2))
    last = len(layers) - 1
    profile = Profile(
        layers, (Tensor(last, (0,), rng.random(), False),), (Times("T4", 2, (1.0, 2.5), rows, rows, rows),),
        (Tied((0, last), 9.5),),
    )  # fmt: skip
    profile.save(tmp_path / "profile.json")
    assert Profile.from_file(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("size", [1, 2.5, 4, 0.5, 16])
def test_seconds_lie_on_the_line_through_the_sizes_measured(size: float) -> None:
    found = Profile.from_dict(given()).seconds("T4", 1, size)
    # through (1, 1 + i) and (4, 4 + i): slope 1
    assert found.forward == pytest.approx([size + i for i in range(4)])
    assert found.backward == pytest.approx([2 * size] * 4)
    assert found.weight == pytest.approx([min(1 + (size - 1) / 3, 2 * size)] * 4), "a part of the backward at any size"


def test_between_sizes_the_nearest_piece_counts(seed: int) -> None:
    rng = random.Random(seed)
    sizes = sorted(rng.sample(range(1, 50), 4))
    rows = tuple((rng.uniform(1, 9),) for _ in sizes)
    profile = Profile((Layer("l", 1),), (), (Times("T4", 1, tuple(map(float, sizes)), rows, rows),))
    for k, size in enumerate(sizes):
        assert profile.seconds("T4", 1, size).forward == pytest.approx(rows[k])
    for k in range(3):
        middle = (sizes[k] + sizes[k + 1]) / 2
        assert profile.seconds("T4", 1, middle).forward == pytest.approx([(rows[k][0] + rows[k + 1][0]) / 2])
    beyond = rows[3][0] + (rows[3][0] - rows[2][0]) * 10 / (sizes[3] - sizes[2])
    assert profile.seconds("T4", 1, sizes[3] + 10).forward == pytest.approx([max(0.0, beyond)])


def test_one_size_grows_in_proportion_but_for_what_is_fixed() -> None:
    profile = Profile.from_dict(given())
    assert profile.seconds("T4", 2, 6).backward == (9.0,) * 4
    assert profile.seconds("T4", 2, 6, fixed=0.5).backward == (6.0,) * 4, "half of 3 s, and thrice the other half"
    assert profile.seconds("T4", 2, 6).weight == (0.0,) * 4, "unknown: not split"


def test_times_that_were_not_measured() -> None:
    for device, tp in (("V100", 1), ("T4", 4)):
        with pytest.raises(ProfileError, match=f"none for '{device}' at tp {tp}") as error:
            Profile.from_dict(given()).seconds(device, tp, 1)
        assert "smpar profile" in error.value.fix


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ([], "the profile is an object"),
        (changed("layers", []), "at least one layer"),
        (changed("layers", 4), "layers of the profile is a list"),
        (changed("times", []), "0 tables of times"),
        (changed("times", {}), "times of the profile is a list"),
        (changed("layers", None), "add 'layers'"),
        (changed("layer", []), "remove 'layer'"),
        (changed("layers.1", "h"), "layers[1] is an object"),
        (changed("layers.1.params", 3), "'params'"),
        (changed("layers.1.parameters", None), "add 'parameters'"),
        (changed("layers.1.parameters", -1), "parameters of layer 'l1' is -1"),
        (changed("layers.1.parameters", True), "True"),
        (changed("layers.1.saved", float("nan")), "saved of layer 'l1' is nan"),
        (changed("layers.1.transient", "1e9"), "'1e9'"),
        (changed("layers.1.name", 7), "name of layer 1 is a name"),
        (changed("layers.1.whole_parameters", 102), "102 > 101"),
        (changed("layers.1.whole_saved", 41), "whole_saved of layer 'l1', saved"),
        (changed("tensors.0.source", 4), "tensor 0 names 4, but there are 4 layers"),
        (changed("tensors.0.targets", [1, -1]), "tensor 0 names -1"),
        (changed("tensors.0.targets", 3), "a list of places"),
        (changed("tensors.0.elements", float("inf")), "elements of tensor 0 is inf"),
        (changed("tensors.0.gradient", "no"), "true or false"),
        (changed("tied.0.layers", [0, 9]), "tied 0 names 9"),
        (changed("tied.0.parameters", 101), "parameters of tied 0, those of layer 0"),
        (changed("times.0.device", 4), "device of times is a name"),
        (changed("times.0.tp", 0), "tp of times of 'T4' is a whole number, 1 or more"),
        (changed("times.0.tp", 1.5), "1.5"),
        (changed("times.0.tp", 2), "several for 'T4' at tp 2"),
        (changed("times.0.microbatches", [4, 1]), "ascending"),
        (changed("times.0.microbatches", [1, 1]), "ascending"),
        (changed("times.0.microbatches", [0, 1]), "ascending"),
        (changed("times.0.microbatches", [1, float("nan")]), "a microbatch size"),
        (changed("times.0.microbatches", 4), "a list of sizes"),
        (changed("times.0.microbatches", []), "ascending"),
        (changed("times.0.forward", [[1, 2, 3, 4], [1, 2, 3]]), "rows of [4, 3] for 2 sizes and 4 layers"),
        (changed("times.0.forward", [[1, 2, 3, 4]]), "every layer needs a cost"),
        (changed("times.0.forward", [1, 2]), "a list of rows"),
        (changed("times.0.backward", []), "rows of [] for 2 sizes"),
        (changed("times.0.backward.1.2", None), "rows of [4, 3]"),
        (changed("times.0.backward.1.2", "?"), "backward of layer 2 at microbatch 4"),
        (changed("times.0.weight.1.2", 9), "9 > 8"),
        (changed("divided.0.tp", 0), "tp of an entry of divided is a whole number"),
        (changed("divided.0.saved", None), "add 'saved'"),
        (changed("divided.0.saved", [1, 2]), "saved of divided at tp 2 is a list of 4 numbers"),
        (changed("divided.0.elements", [1, 2]), "elements of divided at tp 2 is a list of 3 numbers"),
        (changed("divided.0.tied.0", -1), "tied[0] of divided at tp 2 is -1"),
        (changed("divided.0.whole_parameters.1", 51), "51 > 50"),
        (changed("undivided", 3), "undivided is a name"),
        (changed("times.0.weight", [[1, 1, 1, 1]]), "weight: rows of [4] for 2 sizes"),
    ],
)  # fmt: skip
def test_wrong_profiles(wrong: Any, found: str) -> None:
    with pytest.raises(ProfileError) as error:
        Profile.from_dict(wrong)
    assert found in str(error.value) and error.value.fix


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(json.dumps(given())[:-5])
    for name in ("cut.json", "none.json"):
        with pytest.raises(ProfileError, match="a profile is a JSON file"):
            Profile.from_file(tmp_path / name)
