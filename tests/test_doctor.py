"""`dflash doctor` on simulated machines: without a GPU, without fla, with broken packages."""

import json
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import cli
from dflash_cache import doctor, fused, machine
from dflash_cache.doctor import examine, render
from dflash_cache.errors import UsageError
from dflash_cache.machine import Gpu
from dflash_cache.skeleton import check_structure
from tests.test_families import tiny
from tests.tiny_models import hybrid_config, kimi_config, tiny_dense

H200 = Gpu("NVIDIA H200", 139.7, "9.0", "580.65.06")
VERSIONS = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "flash-linear-attention": "0.6.0",
    "fla-core": "0.6.0",
    "causal-conv1d": "1.7.0",
    "transformers": "5.17.0",
    "zarr": "3.4.2",
    "numcodecs": "0.17.1",
}


@pytest.fixture
def simulate(monkeypatch):
    """A machine: its GPUs, packages that are missing, and what the import of some raises."""

    def build(gpus=(H200,), missing=(), broken=None, versions=None, trouble=None):
        have = {k: v for k, v in (VERSIONS | (versions or {})).items() if k not in missing}
        words = {machine.MODULES[k]: v for k, v in (broken or {}).items()}
        absent = {machine.MODULES[k]: "ModuleNotFoundError: no" for k in missing}
        monkeypatch.setattr(doctor, "find_gpus", lambda: (list(gpus), trouble))
        monkeypatch.setattr(machine, "installed", have.get)
        monkeypatch.setattr(machine, "import_error", (words | absent).get)
        monkeypatch.setattr(machine, "_core_of_fla", dict)
        fused.import_fused.cache_clear()
        without_fla = {"fla-core", "triton"} & ({*missing, *(broken or {})})
        for rule in fused.RULES:
            module = None if without_fla else stand_in(f"fla.ops.{rule.name}", rule.name)
            monkeypatch.setitem(sys.modules, f"fla.ops.{rule.name}", module)
        conv = ModuleType("conv")
        conv.causal_conv1d_fn = conv.causal_conv1d = print
        monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", conv)
        gone = "causal-conv1d" in missing
        monkeypatch.setitem(sys.modules, "causal_conv1d", None if gone else conv)

    yield build
    fused.import_fused.cache_clear()


def stand_in(name: str, rule: str) -> ModuleType:
    module = ModuleType(name)
    setattr(module, f"chunk_{rule}", print)
    setattr(module, f"fused_recurrent_{rule}", print)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    configs = {"hybrid": hybrid_config(), "kimi": kimi_config(), "jamba": tiny("jamba")}
    for name, config in configs.items():
        config.save_pretrained(root / name)
        # transformers looks for kernels when a modeling module is first imported: not for fake ones
        with suppress(UsageError):
            check_structure(config)
    return root


def shown(report) -> str:
    console = Console(width=200, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        render(report, console)
    return captured.get()


def packages(report):
    return {p.name: p for p in report.packages}


def test_a_machine_with_everything_is_ready(simulate):
    simulate()
    report = examine()
    assert report.ok
    assert (report.problems, report.remarks) == ([], [])
    assert [p.name for p in report.packages] == ["python", *machine.MODULES]
    assert all(p.works and p.inside and p.command is None for p in report.packages)
    text = shown(report)
    assert "NVIDIA H200, 140 GiB, compute capability 9.0, driver 580.65.06" in text
    assert ">=2.11,<2.16" in text
    assert "ready" in text


def test_without_a_gpu_missing_kernels_are_shown_but_stop_nothing(simulate):
    simulate(gpus=(), missing=("triton", "flash-linear-attention", "fla-core", "causal-conv1d"))
    report = examine()
    assert report.ok
    found = packages(report)
    assert found["triton"].error == "not installed"
    assert found["triton"].command == 'pip install "triton>=3.3"'
    assert not found["triton"].needed
    assert "not needed here" in shown(report)


def test_a_gpu_without_fla_is_a_problem_with_the_command(simulate):
    simulate(missing=("flash-linear-attention", "fla-core"))
    report = examine()
    assert not report.ok
    assert packages(report)["fla-core"].command == "pip install flash-linear-attention"
    wanted = 'flash-linear-attention is needed but does not import (not installed): pip install "'
    assert report.problems[0].startswith(wanted)


def test_what_fla_raises_at_import_is_shown_in_its_own_words(simulate):
    said = "RuntimeError: 0 active drivers ([])."
    simulate(broken={"fla-core": said})
    report = examine()
    assert packages(report)["fla-core"].error == said
    assert said in shown(report)
    assert "--force-reinstall" in str(packages(report)["fla-core"].command)
    assert not report.ok


@pytest.mark.parametrize("error", [RuntimeError, OSError, SyntaxError, AssertionError, KeyError])
def test_no_exception_of_an_import_escapes_or_is_swallowed(monkeypatch, error):
    def fail(_name):
        raise error("first line\nsecond line")

    monkeypatch.setattr(machine, "import_module", fail)
    said = machine.import_error("anything")
    assert said is not None
    assert said.startswith(error.__name__)
    assert "first line" in said
    assert "\n" not in said


def test_causal_conv1d_is_optional(simulate, models):
    simulate(missing=("causal-conv1d",))
    report = examine(str(models / "hybrid"))
    assert report.ok
    assert packages(report)["causal-conv1d"].command == (
        'pip install --no-build-isolation "causal-conv1d>=1.5"'
    )
    linear = next(x for x in report.layers if x.kind == "linear_attention")
    assert linear.cuda == "fla.chunk_gated_delta_rule, fla.causal_conv1d"
    assert "causal-conv1d does not import" in linear.note


def test_a_version_outside_of_the_supported_range_is_a_remark(simulate):
    simulate(versions={"torch": "2.9.1+cu128", "zarr": "3.1.2"})
    report = examine()
    assert report.ok
    assert report.remarks == [
        "torch 2.9.1+cu128 is outside of the supported >=2.11,<2.16: pip install "
        '"torch>=2.11,<2.16"',
        'zarr 3.1.2 is outside of the supported >=3.1.6,<4: pip install "zarr>=3.1.6,<4"',
    ]
    assert ">=3.1.6,<4 (outside)" in shown(report)


def test_a_gpu_that_torch_cannot_use_is_a_problem(simulate):
    simulate(trouble="torch 2.13.0+cpu is built without CUDA")
    report = examine()
    assert report.problems == ["there is a GPU, but torch 2.13.0+cpu is built without CUDA"]


def test_the_layers_of_a_model_say_what_would_run_them(simulate, models):
    simulate()
    report = examine(str(models / "hybrid"))
    assert [(x.kind, x.mixer, x.layers) for x in report.layers] == [
        ("linear_attention", "Qwen3_5GatedDeltaNet", 3),
        ("full_attention", "Qwen3_5Attention", 3),
    ]
    assert report.layers[0].cuda == "fla.chunk_gated_delta_rule, causal_conv1d"
    assert report.layers[0].cpu == "torch reference"
    assert "3 linear_attention" in shown(report)


def test_kimi_needs_kernels_of_its_own(simulate, models):
    simulate()
    report = examine(str(models / "kimi"))
    assert report.layers[0].mixer == "KimiLinearDeltaAttention"
    assert report.layers[0].cuda == "fla.chunk_kda, causal_conv1d"


def test_a_hybrid_on_a_gpu_without_fla_names_the_layers_and_both_ways_out(simulate, models):
    simulate(missing=("flash-linear-attention", "fla-core"))
    report = examine(str(models / "hybrid"))
    assert report.layers[0].cuda is None
    said = next(p for p in report.problems if "Qwen3_5GatedDeltaNet" in p)
    assert "pip install flash-linear-attention" in said
    assert "--allow-slow" in said


def test_a_full_attention_model_on_a_gpu_needs_no_fla(simulate, tmp_path):
    simulate(missing=("triton", "flash-linear-attention", "fla-core", "causal-conv1d"))
    report = examine(str(tiny_dense(tmp_path / "m")))
    assert report.ok
    assert [x.mixer for x in report.layers] == ["Qwen3Attention"]


def test_a_model_that_cannot_be_run_is_a_problem_even_without_a_gpu(simulate, models):
    simulate(gpus=())
    report = examine(str(models / "jamba"))
    assert not report.ok
    assert "JambaMambaMixer" in report.problems[0]
    assert "supported are" in report.problems[0]


def test_only_the_config_of_a_model_is_read(simulate, models, monkeypatch):
    simulate()
    monkeypatch.setattr("safetensors.safe_open", lambda *_: pytest.fail("weights were read"))
    assert not list((models / "hybrid").glob("*.safetensors"))
    assert examine(str(models / "hybrid")).layers


def test_a_missing_model_is_a_usage_error(simulate):
    simulate()
    with pytest.raises(UsageError, match="does not exist"):
        examine("/nowhere/model")


def test_the_command_exits_with_1_where_something_needed_is_missing(simulate, models):
    def run(*words):
        return CliRunner().invoke(cli.main, ["doctor", *map(str, words)])

    simulate()
    assert run().exit_code == 0
    assert run("--model", models / "hybrid").exit_code == 0
    assert run("--model", "/nowhere/model").exit_code == 2
    simulate(missing=("fla-core",))
    ran = run("--json")
    assert ran.exit_code == 1
    report = json.loads(ran.output)
    assert report["ok"] is False
    assert report["gpus"][0]["name"] == "NVIDIA H200"
    assert {p["name"] for p in report["packages"]} == {"python", *machine.MODULES}


def test_the_real_machine_is_described_as_it_is():
    report = examine()
    found = packages(report)
    assert found["torch"].version == torch.__version__
    assert found["zarr"].works
    assert bool(report.gpus) or not torch.cuda.is_available()


def test_the_ranges_are_those_of_pyproject_also_in_an_installed_wheel(monkeypatch, tmp_path):
    here = machine.requirements()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "dflash_cache" / "machine.py"))
    text = (["zarr>=3.1.6,<4", 'triton>=3.3; extra == "cuda"'], {"Requires-Python": ">=3.11"})
    monkeypatch.setattr(machine.metadata, "requires", lambda _: text[0])
    monkeypatch.setattr(machine.metadata, "metadata", lambda _: text[1])
    wheel = machine.requirements()
    assert {name: here[name] for name in ("zarr", "triton", "python")} == wheel


@pytest.mark.parametrize(
    ("cuda", "words"), [(None, "built without CUDA"), ("13.0", "CUDA_VISIBLE_DEVICES")]
)
def test_a_gpu_that_only_nvidia_smi_sees_is_explained(monkeypatch, cuda, words):
    values = ("NVIDIA H200", 139.7, "9.0", "580.65.06")
    monkeypatch.setattr(machine, "_ask_nvidia_smi", lambda: [values])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpus, trouble = machine.find_gpus()
    assert gpus == [H200]
    assert words in str(trouble)


def test_the_gpus_that_torch_sees_are_listed_with_the_driver(monkeypatch):
    monkeypatch.setattr(machine, "_ask_nvidia_smi", lambda: [("x", 1.0, "9.0", "580.65.06")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert machine.find_gpus() == ([Gpu("NVIDIA H200", 150.0, "9.0", "580.65.06")], None)


@pytest.mark.parametrize("output", ["", "No devices were found\n", "garbage, without, meaning\n"])
def test_an_nvidia_smi_that_says_nothing_useful_is_no_gpu(monkeypatch, output):
    monkeypatch.setattr(machine.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    ran = SimpleNamespace(stdout=output, returncode=0)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: ran)
    assert machine._ask_nvidia_smi() == []
    ran.stdout = "NVIDIA H200, 143771, 9.0, 580.65.06\n"
    assert machine._ask_nvidia_smi() == [("NVIDIA H200", 143771 / 1024, "9.0", "580.65.06")]
