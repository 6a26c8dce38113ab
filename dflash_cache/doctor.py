"""`dflash doctor`: one table of what this machine has, what a model needs, and what is missing."""

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_cache.errors import UsageError
from dflash_cache.machine import KERNELS, OPTIONAL, Gpu, Package, find_gpus, find_packages

LINEAR = "linear_attention"


@dataclass(frozen=True)
class LayerClass:
    """Layers of one kind and module class: what computes them on CUDA and on the CPU.

    `cuda` is None if nothing would (then `command` installs it).
    """

    kind: str
    mixer: str
    layers: int
    cuda: str | None
    cpu: str
    note: str
    command: str | None


@dataclass(frozen=True)
class Report:
    """All that was found. `problems`: why an extraction cannot run as it should, one sentence each.

    `remarks` are worth knowing but stop nothing.
    """

    gpus: list[Gpu]
    cuda: str | None
    packages: list[Package]
    model: str | None = None
    layers: list[LayerClass] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "ok": self.ok}


def examine(
    model: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Report:
    """Look at the machine and, with a model (folder or hub id), at what its layers need.

    Of the model only the config is read. `UsageError` for a path that is no model; a model that
    cannot be run is a problem of the report.
    """
    gpus, trouble = find_gpus()
    packages = find_packages(needed=())
    layers: list[LayerClass] = []
    problems = [f"there is a GPU, but {trouble}"] if trouble else []
    usable = {p.name for p in packages if p.works}
    if model is not None and {"torch", "transformers"} <= usable:
        layers, refusal = _layers_of(model, revision, trust_remote_code)
        problems += [refusal] if refusal else []
    linear = model is None or any(x.kind == LINEAR for x in layers)
    packages = [_need(p, gpu=bool(gpus), linear=linear) for p in packages]
    problems += [_problem(p) for p in packages if p.needed and not p.works]
    if gpus:
        problems += [_unbound(x) for x in layers if x.cuda is None]
    return Report(gpus, _cuda(), packages, model, layers, problems, _remarks(packages))


def _need(package: Package, *, gpu: bool, linear: bool) -> Package:
    """Kernels are needed on a GPU by layers of linear attention (without a model: presumably)."""
    kernel = package.name in KERNELS
    wanted = package.name not in OPTIONAL
    return replace(package, needed=wanted and (not kernel or (gpu and linear)))


def _problem(package: Package) -> str:
    return f"{package.name} is needed but does not import ({package.error}): {package.command}"


def _unbound(layers: LayerClass) -> str:
    return (
        f"the {layers.layers} {layers.mixer} layers have no fused kernel here ({layers.note}): "
        f"{layers.command}, or extract with --allow-slow"
    )


def _remarks(packages: list[Package]) -> list[str]:
    return [
        f"{p.name} {p.version} is outside of the supported {p.supported}"
        + (f": {p.command}" if p.command else "")
        for p in packages
        if not p.inside
    ]


def _cuda() -> str | None:
    """The CUDA version that torch is built for; None without torch or CUDA."""
    try:
        import torch
    except (ImportError, OSError):
        return None  # its row in the table tells why
    return torch.version.cuda


def _layers_of(
    model: str, revision: str | None, trust_remote_code: bool
) -> tuple[list[LayerClass], str | None]:
    """The layer classes of a model, or the sentence that refuses it."""
    from dflash_cache.loading import layer_kinds, load_config
    from dflash_cache.skeleton import check_structure

    outer = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    config = outer.get_text_config()
    try:
        kinds = layer_kinds(config)
        structure = check_structure(config, trust_remote_code=trust_remote_code)
    except UsageError as error:
        return [], f"{model} cannot be extracted: {error}"
    counts = Counter(zip(kinds, structure.names, strict=True))
    return [_layer_class(k, m, n, structure.rule) for (k, m), n in counts.items()], None


def _layer_class(kind: str, mixer: str, layers: int, rule: Any) -> LayerClass:
    from dflash_cache.fused import GATED, PIP_FLA, import_fused, why_missing
    from dflash_cache.kernels import REFERENCE

    if kind != LINEAR:
        cuda, cpu = "sdpa with document bounds", "sdpa per document"
        return LayerClass(kind, mixer, layers, cuda, cpu, "", None)
    why = why_missing(rule or GATED)
    if why is not None:
        return LayerClass(kind, mixer, layers, None, REFERENCE, why, PIP_FLA)
    fused = import_fused(rule or GATED)
    names = f"fla.chunk_{fused.rule}, {fused.conv_name}"
    return LayerClass(kind, mixer, layers, names, REFERENCE, fused.note, None)


def render(report: Report, console: Console) -> None:
    """One table, then a line for each command, remark and problem, and a verdict."""
    console.print(_table(report))
    for line in _commands(report):
        console.print(line, markup=False)
    for line in report.remarks:
        console.print(f"note: {line}", markup=False)
    for line in report.problems:
        console.print(f"problem: {line}", markup=False)
    console.print(_verdict(report), markup=False)


def _commands(report: Report) -> list[str]:
    """Below the table, where nothing breaks them: they are there to be copied."""
    wrong = [p for p in report.packages if p.command]
    return [f"to {'mend' if p.version else 'install'} {p.name}: {p.command}" for p in wrong]


def _verdict(report: Report) -> str:
    if not report.ok:
        return "an extraction cannot run here as it should"
    if not report.gpus:
        return "ready; without a GPU everything runs in torch on the CPU"
    return "ready: an extraction runs on the GPU with fused kernels where the target needs them"


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("what is here", "supported", "works"):
        table.add_column(column, overflow="fold")
    for gpu in report.gpus:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        cuda = f", torch for CUDA {report.cuda}" if report.cuda else ""
        what = f"{gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {gpu.capability}"
        table.add_row("GPU", f"{what}{driver}{cuda}")
    if not report.gpus:
        table.add_row("GPU", "none")
    for package in report.packages:
        table.add_row(*_package_row(package))
    for layers in report.layers:
        table.add_row(*_layer_row(layers))
    return table


def _package_row(package: Package) -> tuple[str, ...]:
    works = "yes" if package.works else f"no: {package.error}"
    if not package.works and not package.needed:
        optional = "optional, fla has one" if package.name in OPTIONAL else "not needed here"
        works = f"{works} ({optional})"
    supported = package.supported + ("" if package.inside else " (outside)")
    return (package.name, package.version or "-", supported, works)


def _layer_row(layers: LayerClass) -> tuple[str, ...]:
    note = f" ({layers.note})" if layers.note else ""
    cuda = f"CUDA: {layers.cuda or 'nothing'}{note}; CPU: {layers.cpu}"
    name = f"{layers.layers} {layers.kind}"
    return (name, layers.mixer, "", cuda)
