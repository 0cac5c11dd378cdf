"""The configuration: defaults as documented, and every mistake an error that says what to change."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from typing import Any

import pytest

from smpar.config import Config
from smpar.errors import ConfigError, NotBuiltYet, SmparError


def test_defaults() -> None:
    config = Config.from_dict()
    assert (config.pipeline_parallel_degree, config.tensor_parallel_degree, config.microbatches) == (1, 1, 1)
    assert config.active_microbatches == 3
    assert (config.pipeline, config.placement) == ("interleaved", "DPT")
    assert (config.optimize, config.memory_weight) == ("memory", 0.8)
    assert config.auto_partition and config.default_partition == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.microbatches = 2  # type: ignore[misc]


def test_defaults_that_depend_on_other_keys() -> None:
    config = Config.from_dict({"partitions": 5, "optimize": "speed"})
    assert config.pipeline_parallel_degree == 5
    assert config.active_microbatches == 7
    assert config.memory_weight == 0.2
    assert Config.from_dict({"optimize": "speed", "memory_weight": 0.7}).memory_weight == 0.7
    assert Config.from_dict({"partitions": 2, "active_microbatches": 1}).active_microbatches == 1


def test_reads_itself_back() -> None:
    config = Config.from_dict({"partitions": 2, "placement_strategy": "TPD", "microbatches": 4})
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"microbatch": 4}, ["microbatch", "'microbatches'"]),
        ({"pipeline_paralel_degree": 4}, ["'pipeline_parallel_degree'"]),
        ({"microbatches": 0}, ["`microbatches`", "0 (int)", "1 or more"]),
        ({"microbatches": "4"}, ["'4' (str)"]),
        ({"microbatches": True}, ["True (bool)"]),
        ({"microbatches": 2.5}, ["2.5"]),
        ({"ddp": 1}, ["True or False"]),
        ({"pipeline": "1f1f"}, ["1f1b", "gpipe"]),
        ({"optimize": "time"}, ["memory, speed"]),
        ({"memory_weight": 1.5}, ["0 to 1"]),
        ({"memory_weight": float("nan")}, ["0 to 1"]),
        ({"active_microbatches": 0}, ["active_microbatches"]),
        ({"placement_strategy": "DPP"}, ["placement"]),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, ["another name", "2", "4"]),
        ({"auto_partition": False}, ["default_partition"]),
        ({"partitions": 2, "default_partition": 2}, ["below pipeline_parallel_degree"]),
        ({"default_partition": -1}, ["0 or more"]),
    ],
)
def test_mistakes_are_errors_that_name_the_fix(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(given)
    for word in words:
        assert word in str(caught.value)
    assert not isinstance(caught.value, NotBuiltYet)


@pytest.mark.parametrize(
    "given",
    [
        {"fp16": True},
        {"bf16": True},
        {"fp16_params": True},
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2},
        {"offload_activations": True},
        {"delayed_parameter_initialization": True},
    ],
)
def test_what_is_not_built_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltYet, match="this version does not") as caught:
        Config.from_dict(given)
    assert next(iter(given)) in str(caught.value)


def test_agreeing_alias_and_documented_keys_are_accepted() -> None:
    config = Config.from_dict(
        {
            "partitions": 2,
            "pipeline_parallel_degree": 2,
            "auto_partition": False,
            "default_partition": 1,
            "ddp": True,
            "ddp_port": 12355,
            "ddp_dist_backend": "nccl",
            "sdp_gradient_clipping": 2.0,
            "static_mode": False,
            "fast_mode": True,
        }
    )
    assert config.default_partition == 1 and not config.static_mode


def test_keys_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="smpar"):
        for _ in range(2):
            Config.from_dict({"horovod": True, "contiguous": True, "sdp_max_live_parameters": 7})
    said = [record.getMessage() for record in caplog.records]
    assert len([s for s in said if "'horovod'" in s]) == 1
    assert len([s for s in said if "'sdp_max_live_parameters'" in s]) == 1
    assert not [s for s in said if "contiguous" in s]  # its default: nothing to say


def test_environment() -> None:
    assert Config.from_environment({}) == Config.from_dict({})
    given = {"pipeline_parallel_degree": 2, "microbatches": 4.0}
    assert Config.from_environment({"SM_HP_MP_PARAMETERS": json.dumps(given)}).microbatches == 4
    for text in ("[1]", "{'partitions': 2}", "2"):
        with pytest.raises(ConfigError, match="JSON object"):
            Config.from_environment({"SM_HP_MP_PARAMETERS": text})


def test_errors_survive_pickling() -> None:
    with pytest.raises(SmparError) as caught:
        Config.from_dict({"microbatch": 4})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ConfigError and str(copy) == str(caught.value)
