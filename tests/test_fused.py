"""Importing the fused kernels: what is missing is told, what is there is named."""

import sys
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

import cli
from dflash_cache import extract, fused, kernels, target
from dflash_cache.errors import UsageError
from dflash_cache.extract_config import ExtractConfig
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_hybrid

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_on_the_cpu_fused_kernels_are_not_even_imported(monkeypatch):
    monkeypatch.setattr(fused, "import_module", lambda _: pytest.fail("imported"))
    assert fused.fused_for(CPU, ["linear_attention"]) is None
    assert fused.fused_for(torch.device("cuda"), ["full_attention"]) is None


@pytest.fixture
def no_fla(monkeypatch):
    """A machine without flash-linear-attention; causal-conv1d is missing everywhere here."""
    fused.import_fused.cache_clear()
    for rule in fused.RULES:
        monkeypatch.setitem(sys.modules, f"fla.ops.{rule.name}", None)
    yield
    fused.import_fused.cache_clear()


@pytest.fixture
def fake_fla(monkeypatch):
    """fla with both rules and its convolution, as stand-ins."""
    fused.import_fused.cache_clear()
    names = {"fla.modules.causal_conv1d": ["causal_conv1d"]}
    for rule in fused.RULES:
        names[f"fla.ops.{rule.name}"] = [f"chunk_{rule.name}", f"fused_recurrent_{rule.name}"]
    for name, functions in names.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, lambda *_a, function=function, **_k: function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    yield
    fused.import_fused.cache_clear()


@pytest.mark.parametrize("rule", fused.RULES, ids=lambda r: r.name)
def test_missing_fused_kernels_are_one_sentence_with_both_ways_out(no_fla, rule):
    with pytest.raises(UsageError) as error:
        fused.fused_for(CUDA, ["linear_attention"], rule=rule)
    said = str(error.value)
    assert "\n" not in said
    for part in (rule.title, f"fla.ops.{rule.name}", "pip install flash-linear-attention"):
        assert part in said
    assert "--allow-slow" in said
    assert "--device cpu" in said


def test_with_allow_slow_the_reference_may_run_and_says_so_loudly(no_fla):
    assert fused.fused_for(CUDA, ["linear_attention"], allow_slow=True) is None
    headline = kernels.describe(["linear_attention"] * 3, None, CUDA, None)[0]
    assert headline.startswith("kernels: SLOW torch reference on CUDA (3 GatedDeltaNet layers)")
    assert "fla.ops.gated_delta_rule" in headline
    assert "pip install flash-linear-attention" in headline
    assert "\n" not in headline


def test_allow_slow_changes_nothing_where_the_kernels_are(fake_fla):
    assert fused.fused_for(CUDA, ["linear_attention"], allow_slow=True) == fused.load_fused()


@pytest.mark.parametrize("rule", fused.RULES, ids=lambda r: r.name)
def test_without_causal_conv1d_flas_convolution_is_used_and_named(fake_fla, rule):
    found = fused.fused_for(CUDA, ["linear_attention"], rule=rule)
    assert found is not None
    assert found.chunk() == f"chunk_{rule.name}"
    assert found.recurrent() == f"fused_recurrent_{rule.name}"
    headline = kernels.describe(["linear_attention"], found, CUDA, None, rule)[0]
    start = f"kernels: fla.chunk_{rule.name}, fla.causal_conv1d (1 {rule.title} layers); "
    assert headline.startswith(start + "causal-conv1d does not import (")


def test_a_kernel_that_breaks_at_import_is_told_with_its_own_words(monkeypatch):
    def broken(name):
        raise RuntimeError("0 active drivers ([]).\nThere should only be one.")

    fused.import_fused.cache_clear()
    monkeypatch.setattr(fused, "import_module", broken)
    with pytest.raises(UsageError, match=r"does not import \(0 active drivers \(\[\]\)\.\)"):
        fused.load_fused()


def test_extract_without_fla_on_a_gpu_stops_with_one_sentence_and_writes_nothing(
    no_fla, monkeypatch, tmp_path
):
    model = tiny_hybrid(tmp_path / "m", tiny_tokenizer())
    (tmp_path / "d.jsonl").write_text('{"text": "the fox"}\n')
    monkeypatch.setattr(extract, "choose_device", lambda _: CUDA)
    words = ["extract", "--model", model, "--data", tmp_path / "d.jsonl", "--out", tmp_path / "hs"]
    ran = CliRunner().invoke(cli.main, [str(word) for word in words])
    assert ran.exit_code == 2
    said = " ".join(ran.output.replace("│", " ").split())
    assert "whose fused kernel does not import" in said
    assert "pip install flash-linear-attention" in said
    assert "--allow-slow" in said
    assert "Traceback" not in said
    assert not (tmp_path / "hs").exists()


@pytest.mark.parametrize("allowed", [False, True])
def test_allow_slow_reaches_the_target(monkeypatch, tmp_path, allowed):
    model = tiny_hybrid(tmp_path / "m", tiny_tokenizer())
    (tmp_path / "d.jsonl").write_text('{"text": "the fox"}\n')
    asked: list[bool] = []
    monkeypatch.setattr(target, "fused_for", lambda _d, _k, slow=False, _r=None: asked.append(slow))
    config = ExtractConfig(
        str(model), tmp_path / "d.jsonl", tmp_path / "hs", taps=(0,), seq_len=32, device="cpu",
        allow_slow=allowed,
    )  # fmt: skip
    extract.extract(config, lambda _: None)
    assert asked
    assert set(asked) == {allowed}
