"""What is installed on this machine, whether it imports, and which GPUs there are."""

import platform
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dflash_cache.errors import first_line

PROJECT = "dflash-train"
SMI_SECONDS = 20
SMI_FIELDS = ("name", "memory.total", "compute_cap", "driver_version")
# name on the package index -> the module that proves that it works
MODULES = {
    "torch": "torch",
    "triton": "triton",
    "flash-linear-attention": "fla",
    "fla-core": "fla.ops.gated_delta_rule",
    "causal-conv1d": "causal_conv1d",
    "transformers": "transformers",
    "zarr": "zarr",
    "numcodecs": "numcodecs",
}
KERNELS = ("triton", "flash-linear-attention", "fla-core")
OPTIONAL = ("causal-conv1d",)


@dataclass(frozen=True)
class Gpu:
    """memory in GiB; capability as in 9.0; driver's version where nvidia-smi tells it."""

    name: str
    memory_gib: float
    capability: str
    driver: str | None


@dataclass(frozen=True)
class Package:
    """One row of the table. `error` is what its import raised; `command` mends what is wrong."""

    name: str
    version: str | None
    error: str | None
    supported: str
    inside: bool
    needed: bool
    command: str | None

    @property
    def works(self) -> bool:
        return self.error is None


def installed(name: str) -> str | None:
    """The version of an installed package, None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_error(module: str) -> str | None:
    """The first line of what an import raises, None if it works.

    Whatever it raises: broken extension modules fail in ways of their own, and to tell which is
    what this is for.
    """
    try:
        import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def requirements() -> dict[str, SpecifierSet]:
    """The versions that this project supports, extras included, from pyproject.toml.

    In an installed wheel there is none, but the same in its metadata. `python` is an entry too.
    """
    file = Path(__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
        python = project["requires-python"]
    else:
        lines = metadata.requires(PROJECT) or []
        python = metadata.metadata(PROJECT)["Requires-Python"]
    found = {r.name: r.specifier for r in map(Requirement, lines)}
    return {**found, **_core_of_fla(), "python": SpecifierSet(python)}


def _core_of_fla() -> dict[str, SpecifierSet]:
    """flash-linear-attention names the one version of fla-core that it works with."""
    if installed("flash-linear-attention") is None:
        return {}
    lines = metadata.requires("flash-linear-attention") or []
    plain = [r for r in map(Requirement, lines) if r.marker is None]
    return {r.name: r.specifier for r in plain if r.name == "fla-core"}


def find_packages(needed: Sequence[str]) -> list[Package]:
    """One entry for each of `MODULES`, in their order, after python itself."""
    ranges = requirements()
    python = platform.python_version()
    first = Package(
        "python", python, None, spell(ranges["python"]), python in ranges["python"], True, None
    )
    return [first, *(_package(name, ranges, name in needed) for name in MODULES)]


def _package(name: str, ranges: dict[str, SpecifierSet], needed: bool) -> Package:
    wanted, version = ranges.get(name, SpecifierSet()), installed(name)
    error = import_error(MODULES[name])
    if version is None and error is not None:
        error = "not installed"
    inside = version is None or wanted.contains(version, prereleases=True)
    command = None if error is None and inside else install(name, wanted, broken=version, ok=inside)
    return Package(name, version, error, spell(wanted), inside, needed, command)


def spell(wanted: SpecifierSet) -> str:
    """As people write it: the lower bound first."""
    return ",".join(sorted(map(str, wanted), reverse=True))


def install(name: str, wanted: SpecifierSet, *, broken: str | None, ok: bool) -> str:
    """The command that installs a package, or installs a broken one of a right version anew."""
    source = "flash-linear-attention" if name == "fla-core" and broken is None else name
    options = []
    if name in OPTIONAL:  # built from source, against the torch that is there
        options.append("--no-build-isolation")
    if broken is not None and ok:
        options += ["--force-reinstall", "--no-deps", "--no-cache-dir"]
    what = f'"{source}{spell(wanted)}"' if len(wanted) else source
    return " ".join(["pip install", *options, what])


def find_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs of this machine, and in one sentence why torch cannot use them, if it cannot."""
    seen = [Gpu(*values) for values in _ask_nvidia_smi()]
    if import_error("torch") is not None:
        return seen, "torch does not import" if seen else None
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return seen, _why_unseen(torch) if seen else None
    driver = seen[0].driver if seen else None
    mine = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        mine.append(
            Gpu(found.name, found.total_memory / 2**30, f"{found.major}.{found.minor}", driver)
        )
    return mine, None


def _why_unseen(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return (
        f"torch is built for CUDA {torch.version.cuda} but sees no GPU: the driver is too old for "
        "it, or CUDA_VISIBLE_DEVICES hides the GPUs"
    )


def _ask_nvidia_smi() -> list[tuple[str, float, str, str]]:
    """(name, GiB, capability, driver) of each GPU; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(
            query, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines()]
    whole = [row for row in rows if ran.returncode == 0 and len(row) == len(SMI_FIELDS)]
    return [(n, float(m) / 1024, c, d) for n, m, c, d in whole if m.replace(".", "").isdigit()]
