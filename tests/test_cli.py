"""The commands: what they print, the exit codes, and that a refused call leaves nothing behind."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cli
from dflash_cache.extract_config import ExtractConfig
from dflash_train.config import TrainConfig
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_hybrid

ROOT = Path(__file__).parent.parent
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads"]
SMALL = ["--layers", 1, "--block-size", 4, "--anchors", 4, "--device", "cpu"]


def dflash(*words: object) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def flat(text: str) -> str:
    """Without click's box and line breaks."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("m") / "hybrid", tiny_tokenizer(), layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("d") / "corpus.jsonl"
    texts = [" ".join(rng.choice(WORDS, n)) for n in rng.integers(4, 30, 24)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def extract_words(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    words = ["extract", "--model", model, "--data", data, "--out", out, "--taps", "0,2"]
    return [*words, "--seq-len", 64, "--rows-per-shard", 4, "--heldout", 0.1, *more]


@pytest.fixture(scope="module")
def cache(model, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("c") / "hs"
    ran = dflash(*extract_words(model, data, out))
    assert ran.exit_code == 0, ran.output
    return out


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("r") / "run"
    ran = dflash("train", "--cache", cache, "--out", out, "--steps", 5, *SMALL)
    assert ran.exit_code == 0, ran.output
    return out


HELP = {
    "extract": ["[tokens, default: 4096]", "[path, required]", "[default: bf16]", "1,8,15"],
    "inspect-shard": ["[default: 64; x>=0]", "[tokens]", "Exits with 1", "--plot", "64 rows"],
    "verify": ["--recompute", "[default: 0]", "[default: auto]", "Exits with 1", "[documents]"],
    "doctor": ["--model", "only the model's config is read", "Exits with 1"],
    "convert": ["bf16-lossless", "[required]", "[default: auto]", "SOURCE", "DESTINATION"],
    "train": ["[default: 0.0006]", "[slots, default: 16]", "[steps, default: 500]", "(default: 5)"],
    "eval": ["[default: 128; x>=2]", "[tokens]", "[default: all]", "[required]"],
    "demo": ["[default: demo-run]", "[default: 20; x>=2]", "[default: by device]"],
}


@pytest.mark.parametrize("command", HELP)
def test_help_shows_defaults_and_units(command):
    ran = dflash(command, "--help")
    assert ran.exit_code == 0
    assert [wanted for wanted in HELP[command] if wanted not in flat(ran.output)] == []


def test_the_help_of_the_whole_names_every_command():
    assert set(cli.main.commands) == set(HELP)
    text = dflash("-h").output
    assert all(f"\n  {name}" in text for name in HELP)


def test_every_option_of_a_config_can_be_given_on_the_command_line():
    for name, config in (("extract", ExtractConfig), ("train", TrainConfig)):
        options = {p.name: p for p in cli.main.commands[name].params}
        for field in fields(config):
            assert getattr(options[field.name], "help", "").startswith(field.metadata["help"])


def test_the_commands_work_one_after_the_other(model, data, cache, run):
    shown = dflash("inspect-shard", cache / "shards" / "000000.zarr", "--tokens", 12)
    assert shown.exit_code == 0, shown.output
    assert "states" in shown.output
    assert "[4, 64, 2, 32]" in shown.output
    ran = dflash(*eval_words(model, run, data))
    assert ran.exit_code == 0, ran.output
    assert "identical outputs: 3/3" in ran.output
    assert "tokens a pass, bonus included" in ran.output


def eval_words(model: Path, run: Path, data: Path) -> list[object]:
    words = ["eval", "--model", model, "--drafter", run / "drafter", "--data", data]
    return [*words, "--prompts", 3, "--max-new-tokens", 8, "--device", "cpu"]


def test_json_output_of_every_command_parses(model, data, cache, run, tmp_path):
    made = dflash(*extract_words(model, data, tmp_path / "hs"), "--json")
    assert json.loads(made.stdout)["shards_written"] > 0
    again = dflash(*extract_words(model, data, tmp_path / "hs"), "--json")
    assert json.loads(again.stdout)["shards_written"] == 0
    shown = dflash("inspect-shard", cache, "--json")
    assert json.loads(shown.stdout)["problems"] == []
    words = ["train", "--cache", cache, "--out", tmp_path / "o", "--steps", 2, *SMALL]
    trained = dflash(*words, "--json")
    assert json.loads(trained.stdout)["step"] == 2
    measured = json.loads(dflash(*eval_words(model, run, data), "--json").stdout)
    assert measured["identical"] == measured["prompts"] == 3
    assert measured["tau"] >= 1


def test_the_command_line_wins_over_the_yaml(cache, tmp_path):
    settings = tmp_path / "train.yaml"
    settings.write_text("layers: 1\nblock_size: 4\nanchors: 4\nsteps: 50\nlr: 1e-3\ndevice: cpu\n")
    words = ["train", "--config", settings, "--cache", cache, "--out", tmp_path / "o"]
    ran = dflash(*words, "--steps", 2)
    assert ran.exit_code == 0, ran.output
    start = json.loads((tmp_path / "o" / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["config"]["steps"], start["config"]["lr"]) == (2, 1e-3)


def test_a_run_can_be_resumed_and_is_not_overwritten(cache, run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    before = contents(out)
    words = ["train", "--cache", cache, "--out", out, "--steps", 5, *SMALL]
    refused = dflash(*words)
    assert refused.exit_code == 2
    assert "give --resume" in flat(refused.output)
    assert contents(out) == before
    resumed = dflash(*words, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "at step 5" in resumed.output


def test_a_missing_model_is_refused_before_anything_is_written(data, run, tmp_path):
    gone = tmp_path / "none" / "model"
    for words in (extract_words(gone, data, tmp_path / "hs"), eval_words(gone, run, data)):
        ran = dflash(*words)
        assert ran.exit_code == 2
        assert f"{gone} does not exist" in flat(ran.output)
    assert list(tmp_path.iterdir()) == []


BROKEN = {
    "broken": ('{"text": "a b c"}\n{"text": \n', 2, "the line is not JSON"),
    "no-object": ('{"text": "a b c"}\n\n[1, 2]\n', 3, "the line is a list"),
    "unknown": ('{"txt": "a b c"}\n', 1, "the keys are txt"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_is_named_by_file_and_line(model, run, tmp_path, kind):
    text, line, reason = BROKEN[kind]
    file = tmp_path / "corpus.jsonl"
    file.write_text(text)
    for words in (extract_words(model, file, tmp_path / "hs"), eval_words(model, run, file)):
        ran = dflash(*words)
        assert ran.exit_code == 1
        assert f"{file}:{line}: {reason}" in flat(ran.output)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_file_is_refused(model, run, tmp_path, text):
    file = tmp_path / "corpus.jsonl"
    file.write_text(text)
    for words in (extract_words(model, file, tmp_path / "hs"), eval_words(model, run, file)):
        ran = dflash(*words)
        assert ran.exit_code == 1
        assert f"{file}: the file holds no records" in flat(ran.output)
    assert not (tmp_path / "hs").exists()


@pytest.mark.parametrize(
    ("command", "key", "near"), [("train", "batch_row", "batch_rows"), ("extract", "tap", "taps")]
)
def test_an_unknown_key_in_a_yaml_is_refused_with_a_near_one(tmp_path, command, key, near):
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"{key}: 3\n")
    ran = dflash(command, "--config", settings, "--out", tmp_path / "out")
    assert ran.exit_code == 2
    assert f"{settings}: unknown key '{key}': did you mean {near}" in flat(ran.output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lr", "-1"], "lr is -1.0: give a number above 0"),
        (["--verify", "never"], "verify is 'never': give always or first or off"),
        (["--anchors", "65"], "anchors is 65, but a row has 64 tokens"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--resume"], "holds no checkpoint to resume"),
    ],
)
def test_a_setting_out_of_range_is_refused_before_anything_is_written(
    cache, tmp_path, words, reason
):
    ran = dflash("train", "--cache", cache, "--out", tmp_path / "o", "--steps", 2, *words)
    assert ran.exit_code == 2
    assert reason in flat(ran.output)
    assert not (tmp_path / "o").exists()


def test_a_folder_that_is_no_cache_is_refused(tmp_path):
    ran = dflash("train", "--cache", tmp_path, "--out", tmp_path / "o")
    assert ran.exit_code == 2
    assert "is not a cache" in flat(ran.output)
    assert not (tmp_path / "o").exists()


def test_a_cache_of_other_taps_is_refused_and_stays_as_it_is(model, data, cache):
    before = contents(cache)
    ran = dflash(*extract_words(model, data, cache, "--taps", "1,2"))
    assert ran.exit_code == 2
    assert "this cache was made for taps [0, 2], not [1, 2]" in flat(ran.output)
    assert contents(cache) == before


@pytest.fixture
def damaged(cache, tmp_path) -> Path:
    """A copy of the first shard's cache with one byte of its states turned over."""
    shard = shutil.copytree(cache, tmp_path / "hs") / "shards" / "000000.zarr"
    file = shard / "states" / "c.0.0.0.0"
    content = bytearray(file.read_bytes())
    content[100] ^= 0x40
    file.write_bytes(content)
    return shard


def test_a_damaged_shard_is_named_and_exits_with_1(damaged):
    ran = dflash("inspect-shard", damaged)
    assert ran.exit_code == 1
    assert "000000.zarr" in ran.output
    assert "row 0" in ran.output
    reported = dflash("inspect-shard", damaged, "--json")
    assert reported.exit_code == 1
    assert any("row 0" in problem for problem in json.loads(reported.stdout)["problems"])


def test_what_is_no_shard_exits_with_2(tmp_path):
    assert dflash("inspect-shard", tmp_path).exit_code == 2
    assert dflash("inspect-shard", tmp_path / "none").exit_code == 2


def test_a_demo_does_not_touch_what_is_there_when_it_is_refused(tmp_path):
    (tmp_path / "hs").mkdir()
    refused = dflash("demo", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "--overwrite" in flat(refused.output)
    wrong = dflash("demo", "--out", tmp_path, "--overwrite", "--device", "tpu")
    assert wrong.exit_code == 2
    assert "tpu" in wrong.output
    assert (tmp_path / "hs").is_dir()


def test_a_step_of_the_demo_takes_paths_with_spaces(cache, tmp_path, capsys):
    shard = shutil.copytree(cache, tmp_path / "my hs") / "shards" / "000000.zarr"
    with cli.main.make_context("dflash", ["demo"]) as context:
        cli._step(context, "inspect-shard", shard, "--tokens", 4)
    assert f"$ dflash inspect-shard '{shard}' --tokens 4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_installed_entry_point_has_the_same_exit_codes(damaged, tmp_path):
    def code(*words: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "cli", *map(str, words)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "Traceback" not in ran.stderr
        return ran.returncode, ran.stdout + ran.stderr

    assert code("--version")[0] == 0
    assert code("inspect-shard", damaged)[0] == 1
    status, said = code("train", "--cache", tmp_path / "none", "--out", tmp_path / "o")
    assert status == 2
    assert "is not a cache" in flat(said)


def test_a_closed_pipe_ends_a_command_as_it_ends_any_other(cache):
    words = f"{sys.executable} -m cli inspect-shard {cache}"
    for many in ("", " --json"):
        script = f"set -o pipefail; {words}{many} | true"
        ran = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode in (0, 141), ran.stderr
        assert "Traceback" not in ran.stderr
