"""Families of targets: the right states, or one sentence that refuses them before a long load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dflash_cache.errors import UsageError
from dflash_cache.selfcheck import prove
from dflash_cache.skeleton import check_structure
from dflash_cache.target import Target
from tests.tiny_models import SIZE, kimi_config, moe_config, save_model

TURNS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}


def tiny(family: str, **changes: Any):
    values: dict[str, Any] = SIZE | {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return CONFIG_MAPPING[family](**(values | changes))


RIGHT = {
    "mistral": lambda: tiny("mistral", sliding_window=8),
    "ministral": lambda: tiny("ministral", sliding_window=8),
    "phi3": lambda: tiny("phi3", sliding_window=8),
    "gemma3": lambda: tiny("gemma3_text", **TURNS),
    "gemma2 without softcap": lambda: tiny("gemma2", attn_logit_softcapping=None, **TURNS),
    "cohere2": lambda: tiny("cohere2", **TURNS),
    "olmo3": lambda: tiny("olmo3", **TURNS),
    "exaone4": lambda: tiny("exaone4", **TURNS),
    "smollm3": lambda: tiny("smollm3"),
    "qwen2": lambda: tiny("qwen2"),
    "mixtral": lambda: tiny("mixtral", **EXPERTS),
    "deepseek_v3": lambda: tiny("deepseek_v3", **(LATENT | EXPERTS)),
    "olmo_hybrid": lambda: tiny("olmo_hybrid", **LINEAR),
    "kimi_linear": kimi_config,
}


def outputs_of(folder: Path, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The layers' outputs of the model as transformers runs it."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(plain.get_decoder().layers):
        layer.register_forward_hook(
            lambda _m, _i, out, index=index: found.update(
                {index: out[0] if isinstance(out, tuple) else out}
            )
        )
    with torch.no_grad():
        plain(ids, use_cache=False)
    return found


@pytest.mark.parametrize("family", RIGHT)
def test_states_equal_those_of_transformers_and_do_not_depend_on_packing(family, tmp_path):
    folder = save_model(tmp_path / "m", RIGHT[family]())
    ids = torch.randint(3, 512, (1, 40), generator=torch.Generator().manual_seed(0))
    want = outputs_of(folder, ids)
    target = Target.load(str(folder), taps=[0, 1, 2])
    assert "packed = alone (checked" in prove(target)
    states = target.run_rows(ids, torch.ones_like(ids), torch.arange(40)[None])
    for tap in range(3):
        assert (states[:, :, tap] - want[tap]).norm() < 1e-5 * want[tap].norm()


def test_the_frozen_embedding_is_what_the_first_layer_gets(tmp_path):
    folder = save_model(tmp_path / "m", RIGHT["gemma3"]())
    target = Target.load(str(folder), taps=[0])
    frozen, ids = target.frozen(), torch.arange(20)
    assert torch.equal(frozen.embed[ids], target.model.get_input_embeddings()(ids))
    assert torch.equal(frozen.head, target.model.get_output_embeddings().weight)
    assert not frozen.tied


REFUSED = {
    "jamba": ("linear_attention.*JambaMambaMixer", {}),
    "bamba": ("linear_attention.*BambaMixer", {"mamba_n_heads": 4, "mamba_d_head": 16}),
    "falcon_h1": ("is a hybrid", None),
    "granitemoehybrid": ("linear_attention.*GraniteMoeHybridMambaLayer", None),
    "zamba2": ("is a hybrid", None),
    "nemotron_h": ("is a moe", {}),
    "lfm2": ("is a conv", {"layer_types": ["conv", "full_attention"] * 2}),
    "minimax": ("linear_attention.*MiniMaxLightningAttention", EXPERTS),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", {}),
    "falcon_mamba": ("FalconMambaMixer", None),
    "gemma2": ("Gemma2Attention uses softcap", TURNS),
    "gpt_oss": ("attention sinks", TURNS | EXPERTS),
    "gemma3n_text": (r"\(num_kv_shared_layers\)|\(altup_num_inputs\)", None),
    "llama4_text": ("is a chunked_attention", None),
    "gpt2": ("no list of decoder layers", {}),
    "gpt_neox": ("no final norm", {}),
    "xlstm": ("no list of decoder layers", {}),
    "bert": ("no list of decoder layers", {}),
    "t5": ("cannot build this t5", {}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_in_one_sentence_from_the_config_alone(family):
    words, changes = REFUSED[family]
    config = CONFIG_MAPPING[family]() if changes is None else tiny(family, **changes)
    with pytest.raises(UsageError, match=words) as error:
        check_structure(config.get_text_config())
    said = str(error.value)
    assert "\n" not in said
    assert "supported are" in said
    assert "kimi_linear" in said


def test_a_refused_family_is_refused_before_its_weights_are_looked_for(tmp_path):
    tiny("jamba").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"JambaMambaMixer.*supported are"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_the_structure_of_the_hybrids_is_read_without_weights(family):
    config = kimi_config() if family == "kimi_linear" else moe_config(family)
    structure = check_structure(config)
    rule, ending = ("kda", "DeltaAttention") if family == "kimi_linear" else (
        "gated_delta_rule", "GatedDeltaNet"
    )  # fmt: skip
    assert structure.rule is not None
    assert structure.rule.name == rule
    assert [name.endswith(ending) for name in structure.names] == [True, False, True, False]
    assert all(p.is_meta for mixer in structure.mixers for p in mixer.parameters())
