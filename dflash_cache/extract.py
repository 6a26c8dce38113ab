"""Fill a cache: corpus -> plan -> create or open the cache -> the job (extract_job.py)."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash_cache.cache import Cache, Manifest, check_new_cache, create_cache, save_frozen
from dflash_cache.corpus import Document, load_tokenizer, read_corpus
from dflash_cache.devices import choose_device, choose_dtype
from dflash_cache.encoding import get_encoding
from dflash_cache.equaliser import calibrate
from dflash_cache.errors import UsageError
from dflash_cache.extract_config import ExtractConfig
from dflash_cache.extract_job import ExtractSummary, Job, versions
from dflash_cache.geometry import Geometry
from dflash_cache.identity import check_model_path
from dflash_cache.loading import load_config
from dflash_cache.packing import Plan, make_plan
from dflash_cache.selfcheck import prove
from dflash_cache.target import Target
from dflash_cache.target_files import save_channel_scale

SHARD_BYTES = 1 << 30
TAP_CONVENTION = "tap i is the output of the 0-based decoder layer i, before the final norm"

__all__ = ["ExtractConfig", "ExtractSummary", "extract"]


def place_of_worker(config: ExtractConfig) -> tuple[int, int]:
    """(rank, world): the config's, else torchrun's, else SLURM's, else (0, 1)."""
    names = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
    found = [
        (os.environ[r], os.environ[w]) for r, w in names if r in os.environ and w in os.environ
    ]
    rank, world = (int(x) for x in (found or [("0", "1")])[0])
    rank = rank if config.rank is None else config.rank
    world = world if config.world is None else config.world
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is not one of the {world} workers 0..{world - 1}")
    return rank, world


def extract(config: ExtractConfig, report: Callable[[str], None] = print) -> ExtractSummary:
    """Fill the cache `config.out`; shards that are there are left alone, so a run may be resumed.

    Raises `UsageError` for what the user can mend in the call, `DataError` for a broken corpus, a
    cache made for something else, or too many documents with unusable states. Whatever happens,
    only whole shards stay.
    """
    started = time.monotonic()
    check_model_path(config.model)
    get_encoding(config.encoding)
    if not os.path.isfile(config.out / "manifest.json"):
        check_new_cache(config.out)
    device, place = choose_device(config.device), place_of_worker(config)
    # First, so that a broken config is not blamed on the tokenizer, which reads it too.
    load_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, config.trust_remote_code, config.revision)
    documents, corpus = read_corpus(
        config.data, tokenizer, template_options=config.template_options or {}
    )
    for reason, lines in corpus.skipped.items():
        report(f"corpus: {len(lines)} skipped, {reason} (first: line {lines[0]})")
    target = _load_target(config, device)
    plan, geometry = plan_rows(config, documents, target)
    report(f"plan: {_describe_plan(plan, geometry)}")
    cache = _open_cache(config, target, tokenizer, documents, plan, geometry)
    job = Job(cache, target, documents, config.batch_rows, report)
    job.run(*place)
    return job.summary(time.monotonic() - started)


def _load_target(config: ExtractConfig, device: torch.device) -> Target:
    return Target.load(
        config.model,
        taps=config.taps,
        device=str(device),
        dtype=choose_dtype(config.dtype, device),
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )


def plan_rows(
    config: ExtractConfig, documents: list[Document], target: Target
) -> tuple[Plan, Geometry]:
    """The plan and the geometry that follow from the corpus, the config and the target's shape."""
    geometry = Geometry(config.seq_len, 1, len(target.taps), target.hidden, config.encoding)
    rows = config.rows_per_shard
    plan = make_plan(
        documents,
        seq_len=config.seq_len,
        rows_per_shard=max(1, SHARD_BYTES // geometry.stored_row_bytes) if rows is None else rows,
        heldout=config.heldout,
    )
    plan = replace(plan, rows_per_shard=min(plan.rows_per_shard, plan.rows))
    return plan, replace(geometry, rows_per_shard=plan.rows_per_shard)


def _describe_plan(plan: Plan, geometry: Geometry) -> str:
    cut = f", {plan.truncated} documents cut to {plan.seq_len} tokens" if plan.truncated else ""
    size = plan.rows * geometry.row_bytes / 2**30
    return (
        f"{plan.documents:,} documents, {plan.tokens:,} tokens in {plan.rows:,} rows "
        f"({100 * plan.fill:.1f} % full), {plan.shards} shards, {size:.2f} GiB{cut}"
    )


def _open_cache(
    config: ExtractConfig,
    target: Target,
    tokenizer: Any,
    documents: list[Document],
    plan: Plan,
    geometry: Geometry,
) -> Cache:
    manifest = Manifest(
        geometry=geometry,
        taps=target.taps,
        identity=identity(config, target, tokenizer, plan),
        plan_digest=plan.digest(),
        versions=versions(),
    )
    frozen = target.frozen()

    def save_target(folder: Path) -> None:
        head = None if frozen.tied else frozen.head
        config_dict = target.config.to_dict()
        save_frozen(folder, frozen.embed, head, frozen.norm, config_dict, tokenizer)
        if geometry.how.equalised:
            prove(target)  # the scale is for good: not from kernels that are wrong
            scale = calibrate(target, plan, documents, config.batch_rows)
            save_channel_scale(folder, scale)

    return create_cache(config.out, manifest, plan, save_target)


def identity(config: ExtractConfig, target: Target, tokenizer: Any, plan: Plan) -> dict[str, Any]:
    """All that the states depend on besides taps and geometry: JSON values."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = (
        backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    )
    return {
        "model": target.identity(),
        "tap_convention": TAP_CONVENTION,
        "tokenizer": _sha256(vocabulary),
        "chat_template": _sha256(str(tokenizer.chat_template)),
        "template_options": config.template_options or {},
        "corpus": hashlib.sha256(plan.doc_digest.tobytes()).hexdigest(),
        "heldout": config.heldout,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
