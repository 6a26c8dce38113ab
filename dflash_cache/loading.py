"""Load a target through transformers: its config, cut after the last tap, and all its weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from dflash_cache.errors import DataError, UsageError, first_line
from dflash_cache.fp8 import fp8_blocks, without_quantisation
from dflash_cache.identity import check_model_path, model_folder, weight_files
from dflash_cache.kernels import ATTENTION, SUPPORTED
from dflash_cache.weights import Weights

KINDS = ("full_attention", "sliding_attention", "linear_attention")


def load_config(model: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's config as transformers reads it.

    `UsageError` if there is none, or if it describes weights in a quantisation that we do not read.
    """
    check_model_path(model)
    try:
        config = AutoConfig.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the model {model} cannot be loaded: {first_line(error)}") from error
    fp8_blocks(model, config)
    return config


def layer_kinds(config: Any) -> list[str]:
    """One of `KINDS` per decoder layer of a text config; `UsageError` for any other kind."""
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds:
        kinds = ["full_attention"] * config.num_hidden_layers
    for index, kind in enumerate(kinds):
        if kind not in KINDS:
            raise UsageError(f"layer {index} of this {config.model_type} is a {kind}; {SUPPORTED}")
    return kinds


def cut_config(config: Any, layers: int) -> Any:
    """A copy of a text config that has only the first `layers` decoder layers."""
    cut, before = copy.deepcopy(config), config.num_hidden_layers
    cut.num_hidden_layers = layers
    for name, value in list(vars(cut).items()):
        if "layer" in name and isinstance(value, list) and len(value) == before:
            setattr(cut, name, value[:layers])
    return cut


def load_model(
    model: str,
    outer: Any,
    config: Any,
    *,
    dtype: torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
) -> nn.Module:
    """The causal language model of the text config `config`, on the CPU, without gradients.

    `outer` is the model's whole config. Weights of layers that were cut are left in the file;
    a weight that the file lacks, or a file that is damaged, is a `DataError`. FP8 weights are
    dequantised one by one (transformers would want another package, accelerate, to do so).
    """
    weights = open_weights(model, outer, revision)
    settings: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": ATTENTION,
        "output_loading_info": True,
    }
    try:
        with quiet():
            if weights.blocks is not None:
                loaded, info = _load_fp8(model, weights, settings, revision, trust_remote_code)
            else:
                loaded, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                    model,
                    revision=revision,
                    trust_remote_code=trust_remote_code,
                    use_safetensors=True,
                    **settings,
                )
    except DataError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UsageError(f"the model {model} cannot be loaded: {first_line(error)}") from error
    missing = tie_head(loaded, outer, set(info["missing_keys"]))
    if missing:
        raise DataError(f"the weights of {model} lack {sorted(missing)[0]} ({len(missing)} in all)")
    return loaded.eval().requires_grad_(False)


def _load_fp8(
    model: str,
    weights: Weights,
    settings: dict[str, Any],
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Any, dict[str, Any]]:
    """As `from_pretrained`, but handed the tensors, which are dequantised when they are read."""
    config = without_quantisation(copy.deepcopy(settings["config"]))
    cls = type(build_empty(config, settings["dtype"], trust_remote_code=trust_remote_code))
    state_dict = weights.lazy(weights.names)
    loaded, info = cls.from_pretrained(None, state_dict=state_dict, **settings | {"config": config})
    folder = model_folder(model, revision)
    if (folder / "generation_config.json").is_file():
        loaded.generation_config = GenerationConfig.from_pretrained(folder)
    return loaded, info


def build(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of a text config, its weights random."""
    return cast(Any, AutoModelForCausalLM).from_config(
        copy.deepcopy(config),
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
    )


def build_empty(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The same on the meta device: shapes without memory."""
    with torch.device("meta"):
        return build(config, dtype, trust_remote_code=trust_remote_code)


def open_weights(model: str, outer: Any, revision: str | None) -> Weights:
    """The tensors of a model, none of them read; `DataError` for a file that is damaged."""
    files = weight_files(model_folder(model, revision))
    _check_weights(files)
    return Weights(files, fp8_blocks(model, outer))


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on a GPU; None for the CPU, which may swap."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def check_fits(weights: Weights, layers: int, dtype: torch.dtype, device: torch.device) -> None:
    """`UsageError` if the weights that are to be loaded are larger than the GPU's free memory."""
    free, need = free_memory(device), weights.elements(layers) * dtype.itemsize
    if free is not None and need > free:
        raise UsageError(
            f"the target's weights need {need / 2**30:.1f} GiB in {str(dtype)[6:]}, but {device} "
            f"has {free / 2**30:.1f} GiB free; `dflash extract --stream-layers` runs a target "
            "layer by layer"
        )


def _check_weights(files: list[Path]) -> None:
    """`DataError` for a file whose header is broken or does not fit its size; reads no weights."""
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                continue
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{file}: this weights file is damaged or cut short ({first_line(error)}); "
                "download or copy it again"
            ) from error


def tie_head(model: Any, outer: Any, missing: set[str]) -> set[str]:
    """A multimodal checkpoint may say only in its outer config that the head is the embedding."""
    if "lm_head.weight" in missing and getattr(outer, "tie_word_embeddings", False):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        return missing - {"lm_head.weight"}
    return missing


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' report of unexpected keys: those of the layers that we cut."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
