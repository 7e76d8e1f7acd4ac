"""TrainerConfig: strict keys with the nearest name, types, bounds, live changes all or none."""

import dataclasses

import pytest

from rlkit.config import CheckpointConfig, TrainerConfig
from rlkit.errors import ConfigError


def test_unknown_key_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown TrainerConfig key 'batchsize'; did you mean 'batch_size'\?"):
        TrainerConfig.from_dict({"batchsize": 32})
    with pytest.raises(ConfigError, match=r"'save_intervall'; did you mean 'save_interval'\?"):
        TrainerConfig.from_dict({"checkpoint_config": {"save_intervall": 1}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1e-6}, "lr=-1e-06 is below its least value 0.0"),
        ({"lr": float("nan")}, "lr must be finite, got nan"),
        ({"lr": "fast"}, "lr must be float, got str 'fast'"),
        ({"batch_size": 2.5}, "batch_size must be int, got float 2.5"),
        ({"batch_size": True}, "batch_size must be int, got bool True"),
        ({"temperature": 0}, "temperature=0 must be above 0.0"),
        ({"top_p": 1.5}, "top_p=1.5 is above its greatest value 1.0"),
        ({"kl_estimator": "k9"}, "kl_estimator='k9' is none of"),
        ({"reward_weights": [1.0]}, "reward_weights must be dict, got list"),
        ({"batch_size": 10, "group_size": 4}, "cannot be divided into groups"),
        ({"batch_size": 4, "minibatch_size": 8}, "exceeds batch_size=4"),
        ({"lr_schedule": "linear"}, "set total_steps too"),
        ({"kl_placement": "loss", "kl_estimator": "k1"}, "expected gradient is zero"),
    ],
)
def test_bad_values_say_what_was_given_and_expected(values, message):
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.from_dict(values)
    assert message in str(caught.value)


def test_whole_floats_and_nested_dictionaries_are_taken():
    config = TrainerConfig.from_dict(
        {
            "batch_size": 32.0,
            "kl_coef": 1,
            "checkpoint_config": {"save_interval": 100, "keep_last_k": 3, "async_save": True},
        }
    )
    assert (config.batch_size, config.kl_coef) == (32, 1.0)
    assert isinstance(config.batch_size, int)
    assert isinstance(config.kl_coef, float)
    assert config.checkpoint_config == CheckpointConfig(save_interval=100, keep_last_k=3, async_save=True)
    assert TrainerConfig.from_dict(config.to_dict()) == config


def test_live_changes_are_all_or_none_and_refuse_fixed_fields():
    config = TrainerConfig()
    changed = config.replace_live({"lr": 1e-5, "kl_coef": 0.1})
    assert (changed.lr, changed.kl_coef, config.lr) == (1e-5, 0.1, None)
    with pytest.raises(ConfigError, match="batch_size is fixed once a trainer is built"):
        config.replace_live({"batch_size": 8})
    with pytest.raises(ConfigError, match=r"did you mean 'temperature'\?"):
        config.replace_live({"temprature": 1.0})


def test_every_field_has_a_docstring_and_live_fields_have_specs():
    for cls in (TrainerConfig, CheckpointConfig):
        for field in dataclasses.fields(cls):
            assert cls.doc(field.name).endswith("."), field.name
    specs = TrainerConfig.live_specs()
    assert set(specs) == set(TrainerConfig.live_fields())
    assert specs["clip_low"] == {"type": "float", "min": 0.0, "max": 1.0, "doc": TrainerConfig.doc("clip_low")}
    assert specs["top_k"]["type"] == "int"


def test_prompts_per_step_is_rollouts_over_group_size():
    assert TrainerConfig(batch_size=16, group_size=4).prompts_per_step == 4
