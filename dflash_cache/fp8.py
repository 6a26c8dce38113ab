"""Quantised checkpoints: block-wise FP8 is turned back into bfloat16, others are refused."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_cache.errors import DataError, UsageError

SCALE_SUFFIX = "_scale_inv"
DEQUANTISED = "fp8 dequantised to bfloat16"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Blocks:
    """How a checkpoint is quantised: one scale per block of `rows` x `columns` of a weight."""

    rows: int
    columns: int

    def dequantise(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        """weight e4m3 [.., N, K], scale [.., ceil(N / rows), ceil(K / columns)] -> bf16 [.., N, K].

        Each element times the scale of its block, in float32, rounded once. Raises `DataError`
        naming the weight if the scales do not fit it.
        """
        (n, k), grid = weight.shape[-2:], (-(-weight.shape[-2] // self.rows),)
        grid = (*weight.shape[:-2], *grid, -(-k // self.columns))
        if tuple(scale.shape) != grid:
            raise DataError(
                f"the scales of {name} have shape {tuple(scale.shape)}, but its blocks of "
                f"{self.rows} x {self.columns} need {grid}; download the checkpoint again"
            )
        whole = scale.float().repeat_interleave(self.rows, -2).repeat_interleave(self.columns, -1)
        return (weight.float() * whole[..., :n, :k]).bfloat16()


def fp8_blocks(model: str, outer: Any) -> Fp8Blocks | None:
    """What the model's config says about its quantisation; None for plain weights.

    outer: the model's whole config. Raises `UsageError` for any quantisation but block-wise FP8 of
    e4m3 with float scales.
    """
    settings = _settings(outer)
    if settings is None:
        return None
    method = str(settings.get("quant_method") or "unknown")
    block = list(settings.get("weight_block_size") or [])
    plain = settings.get("fmt") in (None, "e4m3") and settings.get("scale_fmt") in (None, "float")
    if method != "fp8" or len(block) != 2 or min(block) < 1 or not plain:
        raise UsageError(
            f"the weights of {model} are quantised ({_describe(method, settings)}), which is not "
            "supported; give the unquantised checkpoint, or one in block-wise fp8 (e4m3), which is "
            "dequantised on load"
        )
    return Fp8Blocks(int(block[0]), int(block[1]))


def _settings(outer: Any) -> dict[str, Any] | None:
    """`quantization_config` as a dict; multimodal checkpoints may have it in the text config."""
    for config in (outer, outer.get_text_config()):
        found = getattr(config, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def _describe(method: str, settings: dict[str, Any]) -> str:
    names = ("bits", "fmt", "scale_fmt", "weight_block_size", "format")
    told = [f"{n} {settings[n]}" for n in names if settings.get(n) is not None]
    return ", ".join([method, *told])


def without_quantisation(config: Any) -> Any:
    """`config` itself, told that its weights are plain: what it becomes after dequantising."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
