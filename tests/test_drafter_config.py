"""The drafter's config: what z-lab publishes is read, what is written serves every reader."""

import json

import pytest

from dflash_cache.errors import DataError
from dflash_train.drafter_config import DrafterConfig, default_config
from tests.drafting import published

SLIDING_HF = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
NEWER = {
    "block_size": "absent",
    "rope_theta": "absent",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "dflash_config": {
        "block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NEWER,
        NEWER | {"rope_theta": None},
        {"layer_types": "absent"},
        {"sliding_window": 2048, "use_sliding_window": False},
    ],
)
def test_older_and_newer_published_configs_mean_the_same(changes):
    got = DrafterConfig.from_hf(published(**changes))
    assert got == DrafterConfig.from_hf(published())
    assert (got.block_size, got.rope_theta, got.mask_token_id) == (16, 1e6, 151669)
    assert got.target_layer_ids == (1, 9, 17, 25, 33)
    assert got.sliding_window is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NEWER,
        SLIDING_HF | {"sliding_window": 2048, "use_sliding_window": True},
        SLIDING_HF | {"sliding_window": 2048, "is_causal": False},
    ],
)
def test_a_config_survives_being_written_and_read(changes):
    config = DrafterConfig.from_hf(published(**changes))
    assert DrafterConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_what_is_written_serves_every_reader():
    sliding = SLIDING_HF | {"sliding_window": 2048}
    written = DrafterConfig.from_hf(published(**sliding)).to_hf()
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["dtype"] == "bfloat16"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert written["block_size"] == written["dflash_config"]["block_size"] == 16
    assert written["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert written["use_sliding_window"] is True
    assert written["sliding_window"] == 2048
    assert written["tie_word_embeddings"] is False
    assert written["num_target_layers"] == 36
    assert "is_causal" not in written  # it would make the full layers causal, too


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "head_dim", "num_target_layers", "dflash_config",
     "vocab_size", "block_size", "rope_theta"],
)  # fmt: skip
def test_a_missing_key_is_named(key):
    with pytest.raises(DataError, match=key):
        DrafterConfig.from_hf(published(**{key: "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "no dflash_config.mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 36]}}, r"names \[36\]"),
        ({"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}}, "no row"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 5}, "must divide"),
        ({"layer_types": ["full_attention"] * 4}, "names 4 layers of 5"),
        ({"layer_types": ["linear_attention"] * 5}, "linear_attention"),
        ({**SLIDING_HF, "sliding_window": None}, "sliding_window is None"),
        ({**SLIDING_HF, "sliding_window": 8}, "sliding_window is 8"),
        ({"block_size": 1}, "block_size is 1"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        DrafterConfig.from_hf(published(**changes))


def target(hidden, **more):
    base = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 32}
    return base | {"vocab_size": 1000, "rope_theta": 1e6} | more


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(5120, (32, 8, 128)), (2560, (32, 8, 128)), (2048, (32, 8, 128)), (1024, (16, 4, 128)),
     (576, (8, 2, 64)), (128, (2, 1, 64)), (64, (4, 1, 16)), (32, (2, 1, 16))],
)  # fmt: skip
def test_default_heads_shrink_with_the_target(hidden, heads):
    got = default_config(target(hidden), (1, 8), mask_token_id=999)
    assert (got.num_attention_heads, got.num_key_value_heads, got.head_dim) == heads
    assert (got.num_hidden_layers, got.block_size, got.intermediate_size) == (5, 16, 3 * hidden)
    assert got.layer_types == ("full_attention",) * 5


def test_defaults_follow_the_target_and_yield_to_what_is_given():
    nested = {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}
    experts = target(2048, num_experts=256, rms_norm_eps=1e-5, **nested)
    got = default_config(experts, (1, 8), mask_token_id=999, num_attention_heads=6, layers=3)
    assert (got.intermediate_size, got.rope_theta, got.rms_norm_eps) == (6144, 5e5, 1e-5)
    assert (got.num_attention_heads, got.num_key_value_heads, got.num_hidden_layers) == (6, 1, 3)
    same = default_config(experts, (1, 8), mask_token_id=999, head_dim=None)
    assert same.head_dim == 128
    with pytest.raises(DataError, match="vocab_size"):
        default_config(target(64, vocab_size=None), (1,), mask_token_id=1)
