"""Where and in which precision a model runs, from what the user asked for."""

import os

import torch

from dflash_cache.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA if there is any; `cuda` the GPU of this process (under torchrun, its own).

    Raises UsageError for an unknown name, or for CUDA where torch sees none. A CUDA device is made
    the current one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not known; it is auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device is {name}, but torch sees no CUDA GPU here: give cpu")
        if device.index >= torch.cuda.device_count():
            raise UsageError(f"device is {name}, but there are {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU and bfloat16 on CUDA."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known; it is auto, {', '.join(DTYPES)}")
    return DTYPES[name]
