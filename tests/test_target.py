"""States of packed rows, taps, cutting, loading."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_cache.errors import DataError, UsageError
from dflash_cache.taps import check_taps, default_taps, parse_taps
from dflash_cache.target import Target
from tests.hybrid_by_hand import hybrid_layers_by_hand
from tests.tiny_models import (
    VOCAB,
    hybrid_config,
    kimi_config,
    moe_config,
    save_model,
    tiny_dense,
    tiny_hybrid,
)

LENGTHS = (23, 9, 70)
SEQ_LEN = 110
FAMILIES = ["qwen3_5", "qwen3", "llama", "qwen3_next", "qwen3_5_moe", "kimi_linear"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "qwen3_5": tiny_hybrid(root / "hybrid"),
        "qwen3": tiny_dense(root / "qwen3", "qwen3"),
        "llama": tiny_dense(root / "llama", "llama"),
        "qwen3_next": save_model(root / "next", moe_config("qwen3_next")),
        "qwen3_5_moe": save_model(root / "moe", moe_config("qwen3_5_moe")),
        "kimi_linear": save_model(root / "kimi", kimi_config()),
    }


def packed_row(lengths=LENGTHS, seq_len=SEQ_LEN, seed=0):
    """ids, document, position [1, S] of documents packed into one row with a tail."""
    ids = torch.randint(0, VOCAB, (1, seq_len), generator=torch.Generator().manual_seed(seed))
    document, position = torch.zeros(2, 1, seq_len, dtype=torch.long)
    start = 0
    for number, length in enumerate(lengths, start=1):
        document[0, start : start + length] = number
        position[0, start : start + length] = torch.arange(length)
        start += length
    return ids, document, position


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have - want).norm() / want.norm())


def spans(lengths=LENGTHS):
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_states_are_those_of_the_document_alone(folders, family):
    target = Target.load(str(folders[family]), taps=[0, 1, 3])
    ids, document, position = packed_row()
    packed = target.run_rows(ids, document, position)
    # An expert's matrix product rounds by how many tokens of the whole row it gets.
    limit = 1e-5 if hasattr(target.config, "num_experts") else 1e-6
    for span in spans():
        alone = target.run_rows(ids[:, span], torch.ones_like(ids[:, span]), position[:, span])
        for tap in range(3):
            assert relative(packed[:, span, tap], alone[:, :, tap]) < limit


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_equal_the_layer_outputs_of_the_unbound_model(folders, family):
    taps = [0, 1, 2, 3]
    target = Target.load(str(folders[family]), taps=taps)
    plain = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(plain.model.layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: outputs.update({index: out}))
    ids, document, position = packed_row()
    packed = target.run_rows(ids, document, position)
    for span in spans():
        with torch.no_grad():
            plain(ids[:, span], use_cache=False)
        for slot, tap in enumerate(taps):
            assert relative(packed[:, span, slot], outputs[tap]) < 1e-5


def test_taps_equal_a_forward_written_from_the_definition(folders):
    taps = list(range(6))
    target = Target.load(str(folders["qwen3_5"]), taps=taps)
    ids, document, position = packed_row()
    packed = target.run_rows(ids, document, position)
    for span in spans():
        by_hand = hybrid_layers_by_hand(folders["qwen3_5"], ids[0, span])
        for tap in taps:
            assert (
                relative(packed[0, span, tap].double(), by_hand[tap]) < 1e-4
            )  # fp32 against fp64, over six layers


def test_a_token_of_another_document_changes_nothing(folders):
    target = Target.load(str(folders["qwen3_5"]), taps=[5])
    ids, document, position = packed_row()
    before = target.run_rows(ids, document, position)
    changed = ids.clone()
    changed[0, 22] = (changed[0, 22] + 1) % VOCAB  # the last token of document 1
    after = target.run_rows(changed, document, position)
    assert torch.equal(before[:, 23:102], after[:, 23:102])
    assert not torch.equal(before[:, 22], after[:, 22])
    assert torch.equal(before[:, :22], after[:, :22])


def test_a_row_does_not_depend_on_the_other_rows_of_the_batch(folders):
    target = Target.load(str(folders["qwen3_5"]), taps=[0, 5])
    rows = [packed_row(seed=0), packed_row((100, 10), seed=1)]
    batch = target.run_rows(*(torch.cat(x) for x in zip(*rows, strict=True)))
    for row, arrays in enumerate(rows):
        real = arrays[1][0] != 0
        alone = target.run_rows(*arrays)[0, real]
        assert relative(batch[row, real], alone) < 1e-6


def test_the_cut_model_gives_the_states_of_the_full_one(folders):
    row = packed_row()
    for family in ("qwen3_5", "qwen3"):
        cut = Target.load(str(folders[family]), taps=[0, 2])
        full = Target.load(str(folders[family]), taps=[0, 2], full=True)
        assert len(cut.kinds) == 3
        assert len(cut.decoder.layers) == 3
        assert cut.num_layers == full.num_layers == len(full.decoder.layers)
        assert torch.equal(cut.run_rows(*row)[:, :102], full.run_rows(*row)[:, :102])


def test_the_last_tap_is_taken_before_the_final_norm(folders):
    target = Target.load(str(folders["qwen3"]), taps=[3], full=True)
    ids, document, position = packed_row((SEQ_LEN,))
    states = target.run_rows(ids, document, position)[:, :, 0]
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    with torch.no_grad():
        normed = plain.model(ids, use_cache=False).last_hidden_state
    assert relative(target.decoder.norm(states), normed) < 1e-5
    assert relative(states, normed) > 0.1


def test_sliding_layers_see_only_their_window(tmp_path):
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    folder = tiny_dense(tmp_path / "m", "qwen3", use_sliding_window=True, **types)
    target = Target.load(str(folder), taps=[0, 1])
    ids, document, position = packed_row()
    packed = target.run_rows(ids, document, position)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    plain.model.layers[1].register_forward_hook(lambda _m, _i, out: seen.append(out))
    with torch.no_grad():
        plain(ids[:, 32:102], use_cache=False)
    assert relative(packed[:, 32:102, 1], seen[0]) < 1e-5


def test_each_layer_says_what_computed_it(folders):
    target = Target.load(str(folders["qwen3_5"]), taps=[1])
    target.run_rows(*packed_row())
    assert target.describe_kernels() == [
        "kernels: torch reference on CPU (1 GatedDeltaNet layers)",
        "layer 0 linear_attention: delta torch reference, conv torch reference",
        "layer 1 full_attention: attention sdpa per document",
    ]


def test_a_loaded_target_leaves_other_models_of_the_process_alone(folders):
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen3_5"], dtype=torch.float32)
    ids = packed_row()[0]
    with torch.no_grad():
        before = plain(ids, use_cache=False).logits
        target = Target.load(str(folders["qwen3_5"]), taps=[0])
        target.run_rows(*packed_row())
        assert torch.equal(plain(ids, use_cache=False).logits, before)


def test_default_taps_are_z_labs():
    assert default_taps(32) == (1, 8, 15, 22, 29)
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(40) == (1, 10, 19, 28, 37)
    assert default_taps(48) == (1, 12, 23, 34, 45)
    assert default_taps(64) == (1, 16, 31, 46, 61)
    assert default_taps(32, 1) == (16,)


@pytest.mark.parametrize("layers", range(1, 40))
def test_default_taps_always_fit(layers):
    for n in range(1, min(layers, 8) + 1):
        assert check_taps(default_taps(layers, n), layers) == default_taps(layers, n)


def test_taps_are_parsed_and_checked():
    assert parse_taps("1,8, 15") == (1, 8, 15)
    assert parse_taps("auto") is None
    with pytest.raises(UsageError, match="1;2"):
        parse_taps("1;2")
    with pytest.raises(UsageError, match="increasing"):
        check_taps([3, 1], 4)


@pytest.mark.parametrize("tap", [-1, 4, 100])
def test_a_tap_out_of_range_names_the_number_of_layers(folders, tap):
    with pytest.raises(UsageError, match=f"tap {tap} .* 4 layers"):
        Target.load(str(folders["qwen3"]), taps=[tap])


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere/x", "tests/nowhere"])
def test_a_missing_model_folder_is_one_sentence_without_asking_a_network(path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("network"))
    with pytest.raises(UsageError, match="does not exist") as error:
        Target.load(path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        Target.load(str(tmp_path))


def test_weights_in_pickles_are_refused(folders, tmp_path):
    shutil.copy(folders["qwen3"] / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UsageError, match="only safetensors"):
        Target.load(str(tmp_path))


def test_a_missing_weight_is_named(folders, tmp_path):
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj"):
        Target.load(str(tmp_path / "m"), taps=[1])
    assert Target.load(str(tmp_path / "m"), taps=[0]).num_layers == 4


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_a_weights_file_that_is_cut_short_is_named(folders, tmp_path, size):
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=f"{file}: this weights file is damaged .*copy it again"):
        Target.load(str(tmp_path / "m"), taps=[1])


def test_a_broken_index_of_weights_is_named(folders, tmp_path):
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(DataError, match="this index of weights is damaged"):
        Target.load(str(tmp_path / "m"), taps=[1])


def test_an_unsupported_kind_of_layer_is_refused(folders, tmp_path):
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["layer_types"] = ["chunked_attention"] * 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"chunked_attention.*supported are"):
        Target.load(str(tmp_path / "m"))


def test_the_frozen_parts_know_a_tied_head_from_an_untied_one(folders):
    tied = Target.load(str(folders["qwen3_5"]), taps=[0]).frozen()
    untied = Target.load(str(folders["qwen3"]), taps=[0]).frozen()
    assert tied.tied
    assert not untied.tied
    assert tied.embed.shape == untied.head.shape == (VOCAB, 32)
    assert untied.norm.shape == (32,)


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(folders, tmp_path):
    from transformers import Qwen3_5Config

    shutil.copytree(folders["qwen3_5"], tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in weights.items()}
    save_file(renamed, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    text = hybrid_config().to_dict() | {"tie_word_embeddings": False}
    Qwen3_5Config(text_config=text, tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    outer = Target.load(str(tmp_path / "m"), taps=[0, 4])
    inner = Target.load(str(folders["qwen3_5"]), taps=[0, 4])
    assert outer.frozen().tied
    assert torch.equal(
        outer.run_rows(*packed_row())[:, :102], inner.run_rows(*packed_row())[:, :102]
    )


def test_the_identity_tells_other_weights_of_the_same_shape_apart(folders, tmp_path):
    same = save_model(tmp_path / "a" / "hybrid", hybrid_config())
    other = save_model(tmp_path / "b" / "hybrid", hybrid_config(), seed=1)
    identities = [
        Target.load(str(f), taps=[0]).identity() for f in (folders["qwen3_5"], same, other)
    ]
    assert identities[0] == identities[1]
    weights = [i["weights"]["model.safetensors"] for i in identities]
    assert weights[0]["header_sha256"] == weights[2]["header_sha256"]
    assert weights[0]["sample_sha256"] != weights[2]["sample_sha256"]
    assert json.loads(json.dumps(identities[0])) == identities[0]
