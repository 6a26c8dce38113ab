"""The tensors of a model's safetensors files: found by name, read one by one, dequantised."""

import json
import math
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_cache.errors import DataError
from dflash_cache.fp8 import E4M3, SCALE_SUFFIX, Fp8Blocks

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Towers and heads of a multimodal or multi-token checkpoint that a text model never reads.
FOREIGN = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|mtp)\.")
HINT_BYTES = 1 << 26


@dataclass(frozen=True)
class Entry:
    """Where a tensor of `elements` numbers lies: `file`, bytes `start`..`stop` of it."""

    file: Path
    dtype: str
    elements: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Weights:
    """The tensors of a checkpoint, none of them read yet.

    files: its safetensors files. blocks: how it is quantised, None for plain weights. `names` are
    those of the weights, without scales. Raises `DataError` for a damaged header, or for an FP8
    weight without its scales.
    """

    def __init__(self, files: Iterable[Path], blocks: Fp8Blocks | None = None):
        self.blocks = blocks
        self.entries: dict[str, Entry] = {}
        for file in files:
            self.entries |= read_header(file)
        extra = (SCALE_SUFFIX, "activation_scale") if blocks else ()
        self.names = (
            [n for n in self.entries if not n.endswith(extra)] if extra else list(self.entries)
        )
        self._handles: dict[Path, Any] = {}
        self._check_scales()

    def _check_scales(self) -> None:
        for name in self.names:
            entry = self.entries[name]
            if not entry.dtype.startswith("F8"):
                continue
            scaled = self.blocks is not None and name + SCALE_SUFFIX in self.entries
            if not scaled or entry.dtype != "F8_E4M3":
                raise DataError(
                    f"{entry.file}: {name} is stored as {entry.dtype}, which is read only as "
                    f"F8_E4M3 with {name + SCALE_SUFFIX}; download the checkpoint again"
                )

    @cached_property
    def groups(self) -> dict[int | None, list[str]]:
        """Names by decoder layer; None for what lies outside of the layers."""
        groups: dict[int | None, list[str]] = {}
        for name in self.names:
            if not FOREIGN.search(name):
                found = LAYER.search(name)
                groups.setdefault(int(found[1]) if found else None, []).append(name)
        return groups

    def group(self, layer: int | None) -> list[str]:
        return self.groups.get(layer, [])

    def nbytes(self, layer: int | None) -> int:
        """Bytes in the files of one layer's tensors, scales included."""
        return sum(e.nbytes for e in self._stored(layer))

    def elements(self, layers: int) -> int:
        """Numbers in the weights of the first `layers` layers and outside of the layers."""
        wanted = [None, *range(layers)]
        return sum(self.entries[n].elements for layer in wanted for n in self.group(layer))

    def _stored(self, layer: int | None) -> list[Entry]:
        names = self.group(layer)
        scales = [n + SCALE_SUFFIX for n in names if n + SCALE_SUFFIX in self.entries]
        return [self.entries[n] for n in (names + scales if self.blocks else names)]

    def lazy(self, names: Iterable[str], device: torch.device | None = None) -> dict[str, "Lazy"]:
        """{name: what reads it when it is sliced}: a state dict for transformers' loader."""
        return {name: Lazy(self, name, device) for name in names}

    def read(self, name: str, device: torch.device | None = None) -> Tensor:
        """The weight as stored, or in bfloat16 if it is FP8; on the CPU unless told otherwise."""
        weight = self._tensor(name).to(device)
        if self.blocks is None or weight.dtype != E4M3:
            return weight
        scale = self._tensor(name + SCALE_SUFFIX).to(device)
        return self.blocks.dequantise(name, weight, scale)

    def _tensor(self, name: str) -> Tensor:
        file = self.entries[name].file
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            return self._handles[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: {name} cannot be read ({error}); copy it again") from error

    def hint(self, layer: int | None) -> None:
        """Tell the system that this layer is read next; it reads ahead into its file cache."""
        if not hasattr(os, "posix_fadvise"):
            return
        for entry in self._stored(layer):
            with entry.file.open("rb") as file:
                for at in range(entry.start, entry.stop, HINT_BYTES):
                    length = min(HINT_BYTES, entry.stop - at)
                    os.posix_fadvise(file.fileno(), at, length, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True)
class Lazy:
    """Reads its tensor when it is sliced, as a slice of a safetensors file does."""

    weights: Weights
    name: str
    device: torch.device | None

    def __getitem__(self, place: Any) -> Tensor:
        tensor = self.weights.read(self.name, self.device)[place]
        if tensor.is_cuda:
            # transformers reads in threads, whose stream need not be the one that uses the tensor.
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file; `DataError` if it is damaged or cut short."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, size)))
        header.pop("__metadata__", None)
        base = 8 + length
        found = {
            name: Entry(
                file,
                about["dtype"],
                math.prod(about["shape"]),
                *(base + x for x in about["data_offsets"]),
            )
            for name, about in header.items()
        }
        damaged = max((e.stop for e in found.values()), default=base) > size
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise DataError(f"{file}: this weights file is damaged ({error}); copy it again") from error
    if damaged:
        raise DataError(f"{file}: this weights file is cut short; download or copy it again")
    return found
