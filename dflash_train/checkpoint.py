"""Checkpoints: the drafter in the z-lab layout, and the state that resumes a run.

    OUT/checkpoints/step-00000500/
        model.safetensors    bf16, z-lab's names without a prefix, no embedding, no head
        config.json          z-lab's keys
        state.safetensors    fp32 masters and AdamW's moments
        train_state.json     step, settings, identity of the cache, versions, held-out tau if known
    OUT/drafter/             the drafter of the run: model.safetensors and config.json alone

Folders are written under a hidden name and renamed, so a name that exists is complete.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_cache.cache import Cache
from dflash_cache.durable import fsync_path, fsync_tree, save_tensors
from dflash_cache.errors import DataError, UsageError
from dflash_train.config import TrainConfig, binding_fields
from dflash_train.drafter import Drafter, DrafterConfig

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_STEP_NAME = re.compile(r"step-(\d{8,})$")


def save_drafter(folder: Path, drafter: Drafter) -> Path:
    """Write `drafter` in the z-lab layout, bf16, atomically; an existing folder is replaced."""
    with _replaced(folder) as staging:
        _write_drafter(staging, drafter)
    return folder


def copy_drafter(source: Path, folder: Path) -> Path:
    """Write the drafter of checkpoint `source`, as `save_drafter` does."""
    with _replaced(folder) as staging:
        for name in ("model.safetensors", "config.json"):
            shutil.copy(source / name, staging / name)
    return folder


def load_drafter(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """A drafter from a folder in the z-lab layout (ours or z-lab's), in eval mode.

    Raises UsageError for a folder without the two files and DataError naming the first tensor
    that is missing, unknown or of another shape.
    """
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise UsageError(f"{folder} is no drafter: {path.name} is missing; give its folder")
    try:
        config = DrafterConfig.from_hf(_read_json(config_path))
    except DataError as error:
        raise DataError(f"{config_path} describes no DFlash drafter: {error}") from error
    drafter = Drafter(config)
    load_weights(drafter, _read_tensors(weights_path), weights_path)
    return drafter.to(device=device, dtype=dtype).eval()


def load_weights(drafter: Drafter, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Copy `tensors` into the parameters, cast to theirs; DataError names what does not fit."""
    wanted = drafter.state_dict()
    for name in [*wanted, *tensors]:
        if name not in tensors or name not in wanted:
            kind = "missing" if name in wanted else "unknown"
            raise DataError(f"{source}: tensor {name} is {kind}: not this drafter's weights")
        if tensors[name].shape != wanted[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, expected {tuple(wanted[name].shape)}"
            raise DataError(f"{source}: tensor {name} has shape {shapes}: another drafter shape")
    drafter.load_state_dict(tensors)


def cache_identity(cache: Cache, rows: Sequence[int]) -> dict[str, Any]:
    """What a run must find again to continue: the cache, and the rows it trains on."""
    return {
        "manifest": cache.manifest.digest(),
        "plan": cache.manifest.plan_digest,
        "target": cache.manifest.target_digest,
        "train_rows": len(rows),
        "train_rows_digest": hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest(),
    }


def save_checkpoint(
    out: Path,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    config: TrainConfig,
    identity: dict[str, Any],
    tau: float | None = None,
) -> Path:
    """Write `OUT/checkpoints/step-N` after `step` steps, then remove the ones not to be kept.

    Those are the `keep_last` newest and, unless `keep_best` is off, the `best_checkpoint`; `tau` is
    the walked tau on the held-out rows at this very step, if it was measured. Copies to the host
    before casting, so it allocates nothing on the device.
    """
    folder = out / "checkpoints" / f"step-{step:08d}"
    with _replaced(folder) as staging:
        _write_drafter(staging, drafter)
        save_tensors(_resume_tensors(drafter, optimizer), staging / "state.safetensors")
        state = {
            "step": step,
            "config": config.to_dict(),
            "cache": identity,
            "versions": {"torch": torch.__version__},
            "heldout_tau_walk": None if tau is None or math.isnan(tau) else tau,
        }
        _write_json(staging / "train_state.json", state)
    best = best_checkpoint(out) if config.keep_best else None
    for old in checkpoints(out)[: -config.keep_last]:
        if best is None or old != best.folder:
            shutil.rmtree(old)
    return folder


def checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in (out / "checkpoints").glob("step-*") if _STEP_NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


@dataclass(frozen=True)
class Best:
    """A checkpoint and the walked tau on the held-out rows that was measured at its step."""

    folder: Path
    step: int
    tau: float


def best_checkpoint(out: Path) -> Best | None:
    """The checkpoint with the largest held-out tau, of equals the oldest; None if none has any."""
    states = [(p, _read_json(p / "train_state.json")) for p in checkpoints(out)]
    known = [
        Best(p, int(state["step"]), state["heldout_tau_walk"])
        for p, state in states
        if state.get("heldout_tau_walk") is not None
    ]
    return max(known, key=lambda best: best.tau, default=None)


def last_checkpoint(out: Path) -> Path:
    """The newest one, or UsageError: there is nothing to resume."""
    found = checkpoints(out)
    if not found:
        raise UsageError(f"{out} holds no checkpoint to resume: leave --resume out")
    return found[-1]


def resume(
    folder: Path,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    *,
    config: TrainConfig,
    identity: dict[str, Any],
) -> int:
    """Load masters and moments into `drafter` and `optimizer`; returns the steps done.

    Raises UsageError or DataError naming the setting or the part of the cache that differs.
    """
    state = _read_json(folder / "train_state.json")
    _refuse_other_run(state, config, identity, folder)
    path = folder / "state.safetensors"
    tensors = _read_tensors(path)
    masters = {k.removeprefix("master."): v for k, v in tensors.items() if k[:7] == "master."}
    load_weights(drafter, masters, path)
    for name, parameter in drafter.named_parameters():
        if any(f"{m}.{name}" not in tensors for m in _MOMENTS):
            raise DataError(f"{path}: the moments of {name} are missing: use an older checkpoint")
        moments = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS}
        optimizer.state[parameter] = moments
    return int(state["step"])


def _refuse_other_run(
    state: dict[str, Any], config: TrainConfig, identity: dict[str, Any], folder: Path
) -> None:
    now = config.to_dict()
    for name in binding_fields():
        then = state["config"].get(name)
        if then != now[name]:
            raise UsageError(
                f"{name} is {now[name]!r}, but the run in {folder} has {then!r}: "
                "give that value, or another --out"
            )
    for name, value in identity.items():
        if state["cache"].get(name) != value:
            raise DataError(
                f"the cache differs from that of the run in {folder} ({name}: {value}, then "
                f"{state['cache'].get(name)}): give that cache, or another --out"
            )


def _resume_tensors(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in drafter.named_parameters():
        tensors[f"master.{name}"] = parameter.detach().cpu()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu()
    return tensors


def _write_drafter(folder: Path, drafter: Drafter) -> None:
    weights = {
        name: tensor.detach().cpu().to(torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_tensors(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", drafter.config.to_hf())


@contextmanager
def _replaced(final: Path) -> Iterator[Path]:
    """A staging folder beside `final` that takes its name when the block ends without error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        fsync_tree(staging)
        _take_name(staging, final)
    except (SafetensorError, OSError) as error:
        before = any(p != final for p in final.parent.glob("step-*"))
        then = "--resume goes on from the checkpoint before" if before else "start the run anew"
        raise DataError(f"cannot write {final}: {error}; free space there, then {then}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _take_name(staging: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}-old-{os.getpid()}")
    if final.exists():
        final.rename(old)
    try:
        staging.rename(final)
    except BaseException:
        if old.exists():
            old.rename(final)
        raise
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
