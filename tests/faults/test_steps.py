"""Mistakes and failures in steps: each ends in a clear error on all ranks within ten seconds, and none hangs.

a rank fails in its unit ─▶ it raises its own error; all others PeerFailed, with its number and traceback
ranks called differently ─▶ all raise the same error, which names what differs
all make the same mistake ─▶ all raise the same error, and nobody waits first
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.faults import scenarios
from tests.faults.scenarios import MISTAKES, Seen
from tests.harness import Outcome, Pool

LIMIT = 10.0  # s, from the start of the processes to the end of the last one
DYNAMIC = {"static_mode": False}


def ends(outcomes: list[Outcome], killed: int | None = None) -> list[Any]:
    """What the ranks saw; none hung, was late, or ended in a way that it should not."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == ("killed" if rank == killed else "result"), (rank, str(outcome))
        assert outcome.seconds < LIMIT, (rank, outcome.seconds)
    return [outcome.value for outcome in outcomes]


def is_clear(seen: Seen) -> None:
    """The message has its three parts, and shows no raw tuples or addresses."""
    rule, _, rest = seen.text.partition("\n  found: ")
    values, _, fix = rest.partition("\n  to fix: ")
    assert rule and values and fix, seen.text
    assert "0x" not in values.split("\n")[0] and not values.startswith("("), values


# -- one rank fails ------------------------------------------------------------------------------------------------

SCHEDULES: list[dict[str, Any]] = [{"pipeline": "simple"}, {"pipeline": "1f1b"}, {"pipeline": "interleaved"}, DYNAMIC]
LOOP, SPLIT, VEE = ({"pipeline": name} for name in ("interleaved_1f1b", "zb", "zbv"))


def _faults() -> list[tuple[int, str, int, str, dict[str, Any]]]:
    """(ranks, where, step, act, schedule): every pair of values occurs, raising under every schedule and place."""
    raising = list(itertools.product((2, 4), ("forward", "backward"), (0, 2), ("raise",), SCHEDULES))
    killing = [(2, "forward", 0, "kill", SCHEDULES[1]), (4, "backward", 2, "kill", SCHEDULES[2])]
    killing += [(4, "forward", 2, "kill", DYNAMIC), (2, "backward", 0, "kill", SCHEDULES[0])]
    stopping = [(2, "forward", 1, "interrupt", SCHEDULES[2]), (4, "backward", 1, "control-c", DYNAMIC)]
    stopping += [(4, "forward", 1, "control-c", SCHEDULES[1])]
    return raising + killing + stopping + _virtual_and_split()


def _virtual_and_split() -> list[tuple[int, str, int, str, dict[str, Any]]]:
    """The same under several stages per rank, and in each part of a backward that is split."""
    raising = [
        (ranks, where, step, "raise", schedule)
        for schedules, places in (((LOOP, SPLIT, VEE), ("forward", "backward")), ((SPLIT, VEE), ("inputs", "weights")))
        for schedule, where, (ranks, step) in itertools.product(schedules, places, ((2, 0), (4, 2)))
    ]
    killing = [(4, "forward", 2, "kill", LOOP), (4, "weights", 2, "kill", SPLIT), (2, "inputs", 0, "kill", VEE)]
    return [*raising, *killing, (2, "weights", 1, "control-c", VEE)]


def _name(fault: tuple[int, str, int, str, dict[str, Any]]) -> str:
    ranks, where, step, act, schedule = fault
    return f"{act}-{where}-step{step}-{schedule.get('pipeline', 'dynamic')}-{ranks}"


@pytest.mark.parametrize("fault", _faults(), ids=_name)
def test_a_rank_that_fails_in_its_unit_stops_all(
    fault: tuple[int, str, int, str, dict[str, Any]], pool: Pool, seed: int
) -> None:
    ranks, where, step, act, schedule = fault
    part = {"inputs": "in of_inputs\n", "weights": "in of_weights\n"}.get(where, "")
    failing = random.Random(seed).randrange(1 if part else 0, ranks)  # nobody awaits the gradients of zb's first stage
    outcomes = pool.run_fresh(ranks, scenarios.fail_in_step, failing, where, step, act, schedule)
    check_failed(found := ends(outcomes, failing if act == "kill" else None), failing, act)
    if part and act == "raise":
        assert all(part in seen.trace for rank, seen in enumerate(found) if rank != failing), found


def check_failed(found: list[Seen], failing: int, act: str) -> None:
    own = {"raise": "Boom", "interrupt": "KeyboardInterrupt", "control-c": "KeyboardInterrupt"}
    for rank, seen in enumerate(found):
        if rank != failing:
            assert (seen.error, seen.rank) == ("PeerFailed", failing), seen
            is_clear(seen)
            assert f"rank {failing}" in seen.text
            if act != "kill":
                assert own[act] in seen.text and "scenarios.py" in seen.trace, seen.text
        elif act != "kill":
            assert seen.error == own[act], seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_fails_while_others_wait_in_the_sum_of_tied_gradients(ranks: int, pool: Pool) -> None:
    outcomes = pool.run_fresh(ranks, scenarios.fail_in_step, 0, "backward", 1, "raise", {}, True)
    check_failed(ends(outcomes), 0, "raise")


@pytest.mark.parametrize("waiting", ["state_dict", "optimizer", "norm", "step", "barrier"])
def test_a_rank_fails_in_user_code_while_others_wait_for_it(waiting: str, pool: Pool, seed: int) -> None:
    failing = random.Random(seed).randrange(2)
    found = ends(pool.run_fresh(2, scenarios.fails_between_steps, failing, waiting))
    other = found[1 - failing]
    assert (other.error, other.rank) == ("PeerFailed", failing), other
    assert "the user's own code" in other.text


@pytest.mark.parametrize("catching", [(0, 1), (0,), (1,)])
def test_after_an_exception_that_the_user_handled_all_else_is_refused(catching: tuple[int, ...], pool: Pool) -> None:
    found = ends(pool.run_fresh(2, scenarios.caught_by_the_user, 1, catching))
    check_failed([first for first, *_ in found], 1, "raise")
    for rank in catching:
        for later in found[rank][1:]:
            assert (later.error, later.rank) == ("PeerFailed", 1), later
            assert "no such luck" in later.text
            assert later.seconds < 1.0


# -- ranks are called differently ----------------------------------------------------------------------------------

DIFFERENCES = {
    "values": ("RanksDisagree", "argument x of train"),
    "target": ("RanksDisagree", "argument y of train"),
    "samples": ("RanksDisagree", "float32 [8, 8] on rank 0, float32 [12, 8] on rank 1"),
    "width": ("RanksDisagree", "float32 [8, 8] on rank 0, float32 [8, 7] on rank 1"),
    "dtype": ("RanksDisagree", "float32 [8, 8] on rank 0, float64 [8, 8] on rank 1"),
    "few samples": ("RanksDisagree", "float32 [8, 8] on rank 0, float32 [3, 8] on rank 1"),
    "function": ("RanksDisagree", "rank 0 calls train, rank 1 calls other_step"),
    "skipped": ("RanksDisagree", "argument x of train"),
    "eval": ("ProgramsDisagree", "modules in evaluation mode: none on rank 0"),
    "frozen": ("ProgramsDisagree", "blocks.0.linear.weight"),
    "no_grad": ("ProgramsDisagree", "grad mode"),
    "glue": ("ProgramsDisagree", "mse_loss"),
    "blocks": ("ProgramsDisagree", "blocks.1 (Block)"),
}


@pytest.mark.parametrize("config", [{}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("how", DIFFERENCES)
def test_ranks_that_are_called_differently_all_say_so(how: str, config: dict[str, Any], pool: Pool) -> None:
    for steps in (0, 2) if how != "blocks" else (0,):
        found = ends(pool.run_fresh(2, scenarios.called_differently, how, steps, config))
        for seen in found:
            assert seen.error == DIFFERENCES[how][0], seen
            assert DIFFERENCES[how][1] in seen.text, seen.text
            is_clear(seen)
        assert found[0].text == found[1].text


def test_an_argument_may_be_named_on_one_rank_only(pool: Pool) -> None:
    assert [s.error for s in ends(pool.run_fresh(2, scenarios.called_differently, "arguments", 1, {}))] == ["", ""]


def test_random_states_may_differ(pool: Pool) -> None:
    losses = pool.run(4, scenarios.random_states_differ)
    assert all(row == losses[0] for row in losses)
    assert len(set(losses[0])) == 3, "dropout is the same in each step"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_unit_may_use_another_units_weight(ranks: int, pool: Pool) -> None:
    for seen, truth in pool.run(ranks, scenarios.borrowed_weight):
        assert not seen.error, seen
        assert seen.values[0] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("what", ["step", "barrier"])
def test_ranks_that_wait_long_say_where_the_others_are(what: str, pool: Pool) -> None:
    first, last, third = pool.run(3, scenarios.waits_for_a_late_rank, what, 1.5)
    assert not last
    for rank, said in ((0, first), (2, third)):
        (message,) = said
        assert message.startswith(f"smpar: rank {rank} waits at scenarios.py:") and "s already" in message, message
        assert "rank 1 is outside of smpar, at scenarios.py:" in message and " in late" in message, message
        assert f"rank {2 - rank} waits at scenarios.py:" in message, message


# -- init ----------------------------------------------------------------------------------------------------------

GOOD = {"pipeline_parallel_degree": 2, "microbatches": 4}
INITS: dict[str, tuple[dict[str, Any], dict[int, dict[str, Any]], str, tuple[str, ...]]] = {
    "wrong key": ({**GOOD, "microbatchs": 2}, {}, "ConfigError", ("'microbatchs'", "did you mean 'microbatches'?")),
    "wrong key on one rank": (GOOD, {1: {"microbatchs": 2}}, "ConfigError", ("did you mean 'microbatches'?",)),
    "wrong key on rank 0": (GOOD, {0: {"microbatchs": 2}}, "ConfigError", ("did you mean 'microbatches'?",)),
    "other microbatches": (GOOD, {1: {"microbatches": 8}}, "ConfigError", ("microbatches = 4 on rank 0, 8 on rank 1",)),
    "other degree": (GOOD, {1: {"pipeline_parallel_degree": 1}}, "ConfigError", ("2 on rank 0",)),
    "degree does not divide": ({"pipeline_parallel_degree": 4}, {}, "MeshError", ("4 x 1 = 4, with 2 ranks",)),
    "degree does not divide on one rank": (GOOD, {0: {"pipeline_parallel_degree": 4}}, "", ("with 2 ranks",)),
    "default_partition": (
        {**GOOD, "auto_partition": False, "default_partition": 2}, {}, "ConfigError", ("default_partition = 2",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INITS)
def test_a_configuration_that_cannot_be_is_refused_on_all_ranks(name: str, pool: Pool) -> None:
    config, by_rank, error, words = INITS[name]
    for seen in ends(pool.run_fresh(2, scenarios.bad_init, config, by_rank)):
        assert seen.error == error or (not error and seen.error in ("MeshError", "ConfigError")), seen
        assert all(word in seen.text for word in words), seen.text
        is_clear(seen)


# -- all ranks make the same mistake -------------------------------------------------------------------------------

SAID = {
    "backward outside of a step": ("OutsideOfStep", "model.backward was called outside of a step"),
    "backward after the step": ("OutsideOfStep", "model.backward was called outside of a step"),
    "model called outside of a step": ("OutsideOfStep", "model(...) was called outside of a step"),
    "batch smaller than the microbatches": ("BatchError", "x has shape (3, 8): 3 along axis 0, but microbatches = 4"),
    "tensors differ in samples": ("BatchError", "x has 8 samples and y has 9"),
    "fewer units than stages": ("TooFewUnits", "for 2 stages"),
    "backward of several elements": ("WrongBackward", "a tensor of shape [2, 8]"),
    "backward of a detached loss": ("NotThroughModel", "a tensor of shape [] without gradient"),
    "backward of an input": ("NotThroughModel", "no module of the model has a part in"),
    "backward of a float": ("NotThroughModel", "a float"),
    "step in a step": ("NestedStep", "train was called inside a step"),
    "unknown non_split_inputs": ("NoSuchArgument", "<lambda>(model, x, y) has no argument 'z'"),
    "unknown input_split_axes": ("NoSuchArgument", "<lambda>(model, x, y) has no argument 'xx'"),
    "no DistributedModel": ("ModelError", "no smpar.DistributedModel has been made"),
    "second init": ("ConfigError", "microbatches = 8 (before: 4)"),
    "index in set_partition": ("PartitionError", "partition index 2 with 2 pipeline stages, 0 to 1"),
    "index in partition": ("PartitionError", "partition index 2 with 2 pipeline stages, 0 to 1"),
    "exception in glue": ("Boom", "in glue"),
    "missing argument": ("TypeError", "missing 1 required positional argument: 'y'"),
    "shapes that no module takes": ("RuntimeError", "[2, 7] X [8, 8]"),
    "order changes": ("LeftProgram", "blocks.0 (Block)"),
    "a module less": ("LeftProgram", "blocks.1 (Block)"),
    "a module more": ("LeftProgram", "blocks.3 (Block)"),
}
OF_ONE_RANK = {
    "shape depends on data": "blocks.3 (DataShaped) gave float32 [2, 4] with gradient, where its trace has",
    "result depends on data": "blocks.3 (NoneByData) gave None, where its trace has a tensor",
}


def test_every_mistake_is_tested() -> None:
    assert {*SAID, *OF_ONE_RANK} == set(MISTAKES)


@pytest.mark.parametrize("name", SAID)
def test_a_mistake_on_all_ranks_is_an_error_on_all(name: str, pool: Pool) -> None:
    error, words = SAID[name]
    for seen in ends(pool.run_fresh(2, scenarios.mistake, name)):
        if seen.error == "PeerFailed":  # the other rank was first, and this one not yet there
            assert f"raised {error}" in seen.text and words in seen.text, seen.text
            continue
        assert seen.error == error, seen
        assert words in seen.text, seen.text
        if error not in ("Boom", "TypeError", "RuntimeError"):
            is_clear(seen)


@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_a_result_unlike_its_trace_is_found_by_its_home(name: str, pool: Pool) -> None:
    other, home = ends(pool.run_fresh(2, scenarios.mistake, name))
    assert home.error == "UnitMismatch" and OF_ONE_RANK[name] in home.text, home
    is_clear(home)
    assert (other.error, other.rank) == ("PeerFailed", 1) and OF_ONE_RANK[name] in other.text


@pytest.mark.parametrize("name", [n for n in MISTAKES if "changes" in n or "a module " in n])
def test_a_program_that_changes_is_legal_where_it_is_dynamic(name: str, pool: Pool) -> None:
    assert [seen.error for seen in ends(pool.run_fresh(2, scenarios.mistake, name, DYNAMIC))] == ["", ""]
