"""What a target is: where its files lie, and a digest that tells it from another one."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

from dflash_cache.errors import DataError, UsageError

# A header does not change when the same shapes are trained again; a few bytes in between do.
SAMPLES, SAMPLE_BYTES = 64, 4096


def check_model_path(model: str) -> None:
    """`UsageError` for what looks like a folder and is none, before any network is asked."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"the model folder {model} has no config.json")
        check_config_file(path)
        return
    hub_like = model.count("/") <= 1 and not model.startswith((".", "/", "~"))
    beside_others = "/" in model and path.parent.is_dir()
    if path.exists() or not hub_like or beside_others:
        raise UsageError(f"the model folder {model} does not exist")


def check_config_file(folder: Path) -> None:
    """`UsageError` if the folder has a config.json that holds no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        return
    try:
        broken = not isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        broken = True
    if broken:
        raise UsageError(f"{file}: this is not the JSON of a model's config; copy it again")


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder with config.json and the weights: a local one, or the snapshot of a hub model."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    try:
        file = cached_file(model, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise UsageError(f"the model {model} is neither a folder nor found on the hub") from error
    return Path(str(file)).parent


def target_identity(
    model: str, folder: Path, revision: str | None, dtype: torch.dtype, class_name: str
) -> dict[str, Any]:
    """JSON values that differ whenever the states could: see DESIGN of the cache's identity.

    A local model goes by the name of its folder, so that moving it changes nothing; its contents
    are bound by the digests.
    """
    local = Path(model).expanduser().is_dir()
    return {
        "target": folder.resolve().name if local else model,
        "revision": revision,
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights": {p.name: weight_file_digest(p) for p in weight_files(folder)},
        "dtype": str(dtype).removeprefix("torch."),
        "class": class_name,
    }


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those that its index names, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _indexed(index)
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [p.name for p in files if not p.is_file()]
    if missing or not files:
        what = missing[0] if missing else "any *.safetensors file"
        raise UsageError(
            f"the model folder {folder} lacks {what}; only safetensors weights are read"
        )
    return files


def _indexed(index: Path) -> set[str]:
    """The names of the files that the index of a model's weights lists."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: this index of weights is damaged; copy it again") from error


def weight_file_digest(path: Path) -> dict[str, Any]:
    """Size, sha256 of the safetensors header, sha256 of a few kilobytes spread over the data."""
    size = os.path.getsize(path)
    with path.open("rb") as file:
        raw = file.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else size
        if 8 + length > size:
            raise DataError(f"{path}: this safetensors file is cut short; download it again")
        header = hashlib.sha256(file.read(length)).hexdigest()
        sample = hashlib.sha256()
        for i in range(SAMPLES):
            file.seek(8 + length + (size - 8 - length) * i // SAMPLES)
            sample.update(file.read(SAMPLE_BYTES))
    return {"size": size, "header_sha256": header, "sample_sha256": sample.hexdigest()}
