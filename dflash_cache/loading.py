"""Load a target through transformers: its config, cut after the last tap, and all its weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from dflash_cache.errors import DataError, UsageError
from dflash_cache.identity import check_model_path, model_folder, weight_files
from dflash_cache.kernels import ATTENTION, SUPPORTED

KINDS = ("full_attention", "sliding_attention", "linear_attention")


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_config(model: str, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's config as transformers reads it; `UsageError` if there is none."""
    check_model_path(model)
    try:
        return AutoConfig.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the model {model} cannot be loaded: {first_line(error)}") from error


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
    a weight that the file lacks, or a file that is damaged, is a `DataError`.
    """
    _check_weights(weight_files(model_folder(model, revision)))
    try:
        with _quiet():
            loaded, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                model,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                revision=revision,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UsageError(f"the model {model} cannot be loaded: {first_line(error)}") from error
    missing = _tie_head(loaded, outer, set(info["missing_keys"]))
    if missing:
        raise DataError(f"the weights of {model} lack {sorted(missing)[0]} ({len(missing)} in all)")
    return loaded.eval().requires_grad_(False)


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


def _tie_head(model: Any, outer: Any, missing: set[str]) -> set[str]:
    """A multimodal checkpoint may say only in its outer config that the head is the embedding."""
    if "lm_head.weight" in missing and getattr(outer, "tie_word_embeddings", False):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        return missing - {"lm_head.weight"}
    return missing


@contextmanager
def _quiet() -> Iterator[None]:
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
