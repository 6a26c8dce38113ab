"""From a cache and a configuration to a drafter, its anchors, and the words that describe them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_cache.cache import Cache, FrozenTarget
from dflash_cache.errors import DataError, UsageError
from dflash_train.checkpoint import load_drafter
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter, DrafterConfig, default_config
from dflash_train.loss import default_gamma


def check_cache(cache: Cache) -> list[str]:
    """Lines to print about an unfinished cache; DataError if its files are not its manifest's.

    A row's own checksum is checked when the row is read.
    """
    problems = cache.verify_target()
    present = sorted(set(range(cache.plan.shards)) - set(cache.missing()))
    for k in present:
        problems += cache.foreign_problems(cache.shard(k), k)
    if problems:
        raise DataError(
            f"{cache.path} is damaged or was edited: {problems[0]}; run `dflash extract` into "
            "another folder"
        )
    if len(present) == cache.plan.shards:
        return []
    return [
        f"the cache is unfinished: {len(present)} of {cache.plan.shards} shards are there, and "
        "only their rows are used; the same `dflash extract` command finishes it"
    ]


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """Dtype of the computation; the weights are fp32 masters in either case."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def pick_anchors(config: TrainConfig, seq_len: int) -> int:
    """Anchors a row: as configured, or one per 8 tokens."""
    anchors = config.anchors or max(1, seq_len // 8)
    if anchors > seq_len:
        raise UsageError(
            f"anchors is {anchors}, but a row has {seq_len} tokens: give {seq_len} or fewer"
        )
    return anchors


def build_drafter(
    config: TrainConfig, cache: Cache, frozen: FrozenTarget, device: torch.device
) -> Drafter:
    """fp32 drafter for the cache's target: from `init_from`, or new weights from the seed.

    The weights are drawn on the CPU, so they are the same on every device.
    """
    if config.init_from is not None:
        return _initial_drafter(config, cache, frozen, device)
    shape = drafter_config(config, cache, frozen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Drafter(shape).to(device)


def drafter_config(config: TrainConfig, cache: Cache, frozen: FrozenTarget) -> DrafterConfig:
    """The shape: the target's defaults and what the configuration overrides."""
    overrides = config.drafter_overrides()
    if "mask_token_id" not in overrides:
        overrides["mask_token_id"] = first_unused_token(cache.target_dir, len(frozen.embed))
    layers = overrides.pop("num_hidden_layers", 5)
    if config.sliding_layers:
        sliding = min(config.sliding_layers, layers)
        kinds = ("sliding_attention",) * sliding + ("full_attention",) * (layers - sliding)
        overrides |= {"layer_types": kinds, "sliding_window": config.sliding_window}
    try:
        return default_config(frozen.config, cache.manifest.taps, layers=layers, **overrides)
    except DataError as error:  # what does not fit was asked for here
        raise UsageError(str(error)) from error


def _initial_drafter(
    config: TrainConfig, cache: Cache, frozen: FrozenTarget, device: torch.device
) -> Drafter:
    folder = Path(str(config.init_from))
    drafter = load_drafter(folder, device, torch.float32).train()
    shape = drafter.config
    asked: dict[str, Any] = {
        **config.drafter_overrides(),
        "target_layer_ids": tuple(cache.manifest.taps),
        "hidden_size": cache.geometry.hidden,
        "vocab_size": len(frozen.embed),
    }
    for name, value in asked.items():
        if getattr(shape, name) != value:
            raise DataError(
                f"{folder} has {name} {getattr(shape, name)}, but this run needs {value}: "
                "give a drafter of the same shape and target"
            )
    return drafter


def first_unused_token(target_dir: Path, vocab_size: int) -> int:
    """The first row of the embedding that the tokenizer cannot emit: it will mean `to fill in`.

    Reads `tokenizer.json`. UsageError asks for `mask_token_id` where it is missing or uses every
    row of the embedding.
    """
    path = target_dir / "tokenizer.json"
    ask = "give --mask-token-id, an id of the embedding that never occurs in the text"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = [int(token["id"]) for token in content.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot choose a mask token from {path} ({error!r}): {ask}") from error
    plain = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    used = np.zeros(vocab_size, dtype=bool)
    used[[i for i in [*plain, *added] if i < vocab_size]] = True
    if used.all():
        raise UsageError(f"the tokenizer uses all {vocab_size} rows of the embedding: {ask}")
    return int(np.argmin(used))


def describe(
    config: TrainConfig,
    cache: Cache,
    drafter: Drafter,
    *,
    rows: int,
    anchors: int,
    steps: int,
    world: int = 1,
) -> list[str]:
    """What is printed at the start: shape, schedule, and anchors per supervised token."""
    s, parameters = drafter.config, sum(p.numel() for p in drafter.parameters())
    sliding = s.layer_types.count("sliding_attention")
    windows = f", {sliding} sliding (window {s.sliding_window})" if sliding else ""
    gamma = config.gamma or default_gamma(s.block_size)
    loss = "D-PACE" if config.loss == "dpace" else f"decay, gamma {gamma:g}"
    each = config.accumulation // world
    ranks = f" on {world} ranks, {each} x {config.batch_rows} rows each" if world > 1 else ""
    supervised = supervised_per_row(cache)
    per_token = f"{anchors / supervised:.3f}" if supervised else "no"
    return [
        f"drafter: {parameters:,} parameters; {s.num_hidden_layers} layers{windows}; hidden "
        f"{s.hidden_size}, intermediate {s.intermediate_size}, {s.num_attention_heads} query and "
        f"{s.num_key_value_heads} kv heads of {s.head_dim}; taps {list(s.target_layer_ids)}; "
        f"block {s.block_size}, mask token {s.mask_token_id}",
        f"cache: {rows:,} train rows of {cache.geometry.seq_len} tokens; {steps:,} steps of "
        f"{config.rows_per_step} rows{ranks}",
        f"anchors: {anchors} a row, {per_token} per supervised token "
        f"({supervised:,.0f} supervised tokens a row in the first shard)",
        f"AdamW: lr {config.lr}, betas ({config.beta1}, {config.beta2}), weight decay "
        f"{config.weight_decay}, warm-up {config.warmup}, clip {config.clip}; loss: {loss}",
    ]


def supervised_per_row(cache: Cache) -> float:
    """Supervised tokens a row in the first shard that is present."""
    present = sorted(set(range(cache.plan.shards)) - set(cache.missing()))
    if not present:
        raise DataError(f"{cache.path} has no shards yet: run `dflash extract` first")
    shard = cache.shard(present[0])
    return shard.attributes["supervised"] / shard.rows
