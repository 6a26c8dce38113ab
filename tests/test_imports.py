"""Who may import whom: training never reaches the target's side, and no package the command."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TARGET_SIDE = {f"dflash_cache.{m}" for m in ("target", "kernels", "corpus", "extract", "decoding")}
MAY_DECODE = {"evaluate.py", "speculate.py"}


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 10
    return found


def imported(source: str) -> Iterator[str]:
    """Dotted names of all imports, those inside of functions too; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import would escape this check"
            base = str(node.module)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def test_the_check_sees_every_form_of_import():
    for form in (
        "import dflash_cache.target",
        "from dflash_cache import target",
        "from dflash_cache.target import Target",
        "def f():\n    import dflash_cache.target as t",
    ):
        assert "dflash_cache.target" in set(imported(form))


def test_only_the_evaluation_imports_the_target_side():
    for file in sources("dflash_train"):
        found = TARGET_SIDE & set(imported(file.read_text(encoding="utf-8")))
        assert not found or file.name in MAY_DECODE, f"{file.name} imports {sorted(found)}"


def test_training_modules_do_not_import_the_evaluation():
    decoding = {f"dflash_train.{name.removesuffix('.py')}" for name in MAY_DECODE}
    for file in sources("dflash_train"):
        if file.name not in MAY_DECODE:
            assert not decoding & set(imported(file.read_text(encoding="utf-8"))), file.name


@pytest.mark.parametrize("package", ["dflash_cache", "dflash_train"])
def test_no_package_imports_the_command(package):
    for file in sources(package):
        names = {name.split(".")[0] for name in imported(file.read_text(encoding="utf-8"))}
        assert "cli" not in names, file.name


def test_the_cache_does_not_know_of_training():
    for file in sources("dflash_cache"):
        names = {name.split(".")[0] for name in imported(file.read_text(encoding="utf-8"))}
        assert "dflash_train" not in names, file.name


@pytest.mark.slow
def test_a_trainer_that_is_loaded_has_brought_neither_the_target_nor_transformers():
    code = "import sys, dflash_train.trainer; print('\\n'.join(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "dflash_train.step" in loaded
    # `packing` knows `corpus.Document`, and `corpus` loads a tokenizer only when it is asked to.
    assert loaded & TARGET_SIDE <= {"dflash_cache.corpus"}
    assert "transformers" not in loaded
