"""`target/` of a cache: all that training needs of the target without loading the target."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_cache.durable import save_tensors
from dflash_cache.errors import DataError

WEIGHTS, CONFIG = "frozen.safetensors", "config.json"
EQUALISER, CHANNEL_SCALE = "channel_scale.safetensors", "channel_scale"
EMBED, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
BLOCK = 1 << 22


@dataclass
class FrozenTarget:
    """The frozen parts of the target that a drafter shares.

    `embed` [V, D]; `head` [V, D] (the very same tensor when the target ties them); `norm` [D], the
    weight of the target's final norm as stored; `config` the text config as a dict.
    """

    embed: Tensor
    head: Tensor
    norm: Tensor
    config: dict[str, Any]

    @property
    def tied(self) -> bool:
        return self.head is self.embed


def save_frozen(
    folder: Path,
    embed: Tensor,
    head: Tensor | None,
    norm: Tensor,
    config: dict[str, Any],
    tokenizer: Any = None,
) -> None:
    """Write `config.json`, `frozen.safetensors` and the tokenizer's files into `folder`.

    `embed` [V, D], `head` [V, D] or None if tied, `norm` [D]; dtypes are kept as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {EMBED: embed, NORM: norm} | ({} if head is None else {HEAD: head})
    # A copy of each: views of one storage (a sliced head, say) are refused by safetensors.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_tensors(tensors, folder / WEIGHTS, metadata={"tied": str(head is None).lower()})
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False, default=str)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def load_frozen(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> FrozenTarget:
    """Read what `save_frozen` wrote; `dtype` None keeps the stored one.

    Without a stored head (tied) `head` is `embed`, not a second copy. Raises `DataError` for a
    missing or damaged file.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS, device=str(device))
        embed, norm = (tensors[name].to(dtype=dtype) for name in (EMBED, NORM))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"{folder}: the target's files cannot be read ({error})") from error
    head = tensors[HEAD].to(dtype=dtype) if HEAD in tensors else embed
    return FrozenTarget(embed, head, norm, config)


def save_channel_scale(folder: Path, scale: Tensor) -> None:
    """Write the equaliser of the channels, float32 [T, D]."""
    save_tensors({CHANNEL_SCALE: scale.float().cpu().contiguous()}, folder / EQUALISER)


def load_channel_scale(folder: Path) -> Tensor:
    """What `save_channel_scale` wrote; `DataError` if it is missing or damaged."""
    try:
        return load_file(folder / EQUALISER)[CHANNEL_SCALE]
    except (OSError, KeyError, SafetensorError) as error:
        raise DataError(
            f"{folder / EQUALISER}: the channel scale cannot be read ({error})"
        ) from error


def digest_files(folder: Path) -> dict[str, str]:
    """{path relative to `folder`: sha256 hex} of every file below it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): _sha256(p) for p in files}


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
