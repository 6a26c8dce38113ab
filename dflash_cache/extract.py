"""Fill a cache: corpus -> plan -> create or open the cache -> the job (extract_job.py)."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache, Manifest, create_cache, is_cache, save_frozen
from dflash_cache.corpus import Document, load_tokenizer, read_corpus
from dflash_cache.devices import choose_device, choose_dtype
from dflash_cache.encoding import get_encoding
from dflash_cache.equaliser import calibrate, sample_rows
from dflash_cache.errors import UsageError
from dflash_cache.estimate import (
    Estimate,
    check_space,
    first_batch,
    make_estimate,
    measure,
    plan_bytes,
)
from dflash_cache.extract_config import ExtractConfig
from dflash_cache.extract_job import Job, versions
from dflash_cache.extract_summary import ExtractSummary
from dflash_cache.geometry import Geometry
from dflash_cache.identity import check_model_path
from dflash_cache.loading import load_config
from dflash_cache.packing import Plan, make_plan
from dflash_cache.selfcheck import prove, prove_compiled
from dflash_cache.stopping import StopSignals
from dflash_cache.streamed import StreamedTarget
from dflash_cache.target import Target
from dflash_cache.target_files import save_channel_scale

SHARD_BYTES = 1 << 30
COMPILE_FROM = 1_000_000  # tokens that repay a minute of compiling
TAP_CONVENTION = "tap i is the output of the 0-based decoder layer i, before the final norm"

__all__ = ["ExtractConfig", "ExtractSummary", "dry_run", "extract"]


def place_of_worker(config: ExtractConfig) -> tuple[int, int]:
    """(rank, world): the config's, else torchrun's, else SLURM's, else (0, 1)."""
    names = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
    found = [
        (os.environ[r], os.environ[w]) for r, w in names if r in os.environ and w in os.environ
    ]
    if not found and (config.rank is None) != (config.world is None):
        given, other = ("rank", "world") if config.world is None else ("world", "rank")
        raise UsageError(f"--{given} is given without --{other}; give both or neither")
    rank, world = (int(x) for x in (found or [("0", "1")])[0])
    rank = rank if config.rank is None else config.rank
    world = world if config.world is None else config.world
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is not one of the {world} workers 0..{world - 1}")
    return rank, world


@dataclass(frozen=True)
class Prepared:
    """All that is known before anything is written; `left_out`: reason -> lines of the corpus."""

    target: Target
    tokenizer: Any
    documents: list[Document]
    left_out: dict[str, int]
    plan: Plan
    geometry: Geometry
    rank: int
    world: int


def extract(config: ExtractConfig, report: Callable[[str], None] = print) -> ExtractSummary:
    """Fill the cache `config.out`; shards that are there are left alone, so a run may be resumed.

    Raises `UsageError` for what the user can mend in the call, `DataError` for a broken corpus, a
    cache made for something else, or too many documents with unusable states. Whatever happens,
    only whole shards stay. SIGTERM and Ctrl-C end it after the row in flight (the summary says so),
    and before there is a cache at once, by an exception.
    """
    started = time.monotonic()
    with StopSignals() as stop:
        rank, _ = place_of_worker(config)
        say = report if rank == 0 else _silent
        work = prepare(config, say)
        manifest = _manifest(config, work)
        estimate, missing = _estimate(config, work, manifest)
        say(estimate.render())
        _forecast(config, work, estimate.missing_shards, say)
        check_space(estimate, config.force, say)
        kernels = _make_ready(config, work, missing, say)
        if rank == 0:
            for line in _timed(config, work, estimate, missing).time_lines():
                say(line)
        cache = _open_cache(config, work, manifest, say)
        job = Job(cache, work.target, work.documents, config.batch_rows, say, kernels)
        job.run(work.rank, work.world, stop)
        return job.summary(time.monotonic() - started)


def _silent(_line: str) -> None:
    """What a worker other than the first one says while it works."""


def dry_run(config: ExtractConfig, report: Callable[[str], None] = print) -> Estimate | None:
    """What `extract` would do; writes nothing. None for a worker that is not the first."""
    if place_of_worker(config)[0] > 0:
        return None
    work = prepare(config, report)
    estimate, missing = _estimate(config, work, _manifest(config, work))
    _forecast(config, work, estimate.missing_shards, report)
    if not config.stream_layers:  # whose checks would read the checkpoint
        _make_ready(config, work, missing, report)
    return _timed(config, work, estimate, missing)


def _forecast(
    config: ExtractConfig, work: Prepared, missing_shards: int, report: Callable[[str], None]
) -> None:
    """What the target itself costs, for this worker's share of the shards."""
    shards = -(-missing_shards // work.world)
    rows = min(shards * work.plan.rows_per_shard, work.plan.rows)
    for line in work.target.forecast(rows, config.batch_rows, config.seq_len) if rows else []:
        report(line)


def prepare(config: ExtractConfig, report: Callable[[str], None]) -> Prepared:
    """Read the corpus, load the target, make the plan."""
    if config.compile and config.stream_layers:
        raise UsageError("compile and stream_layers exclude each other; give one of them")
    check_model_path(config.model)
    get_encoding(config.encoding)
    is_cache(config.out)  # refuses a place where none can be
    device, (rank, world) = choose_device(config.device), place_of_worker(config)
    # First, so that a broken config is not blamed on the tokenizer, which reads it too.
    load_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, config.trust_remote_code, config.revision)
    documents, corpus = read_corpus(
        config.data, tokenizer, template_options=config.template_options or {}
    )
    for reason, lines in corpus.skipped.items():
        report(f"corpus: {len(lines)} skipped, {reason} (first: line {lines[0]})")
    left_out = {reason: len(lines) for reason, lines in corpus.skipped.items()}
    target = _load_target(config, device)
    plan, geometry = plan_rows(config, documents, target)
    return Prepared(target, tokenizer, documents, left_out, plan, geometry, rank, world)


def _make_ready(
    config: ExtractConfig, work: Prepared, missing: list[int], report: Callable[[str], None]
) -> list[str]:
    """Prove the kernels and compile the layers, if there is anything to do -> lines told."""
    if not missing:
        return []
    lines = [prove(work.target)]
    report(lines[0])
    if _compiles(config, work):
        lines.append(prove_compiled(work.target, _first_batch(config, work, missing)))
        report(lines[1])
    return lines


def _compiles(config: ExtractConfig, work: Prepared) -> bool:
    worth = work.target.device.type == "cuda" and work.plan.tokens >= COMPILE_FROM
    return not config.stream_layers and (worth if config.compile is None else config.compile)


def _first_batch(
    config: ExtractConfig, work: Prepared, missing: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = work.plan.shard_rows(missing[0])
    return first_batch(work.target, work.plan, work.documents, rows, config.batch_rows)


def _timed(
    config: ExtractConfig, work: Prepared, estimate: Estimate, missing: list[int]
) -> Estimate:
    # A streamed target reads its whole checkpoint for a batch as for a macro-batch.
    if not missing or config.stream_layers:
        return estimate
    rows = work.plan.shard_rows(missing[0])
    speed = measure(work.target, work.geometry, work.plan, work.documents, rows, config.batch_rows)
    return estimate.timed(speed)


def _estimate(
    config: ExtractConfig, work: Prepared, manifest: Manifest
) -> tuple[Estimate, list[int]]:
    """With the missing shards; `DataError` if the cache is there and is another one."""
    if is_cache(config.out):
        cache = Cache.open(config.out)
        cache.check_identity(manifest)
        missing, more, sample = cache.missing(), 0, 0
    else:
        frozen = work.target.frozen()
        parts = [frozen.embed, frozen.norm, *([] if frozen.tied else [frozen.head])]
        missing, sample = list(range(work.plan.shards)), _sample_tokens(work)
        more = sum(part.nbytes for part in parts) + plan_bytes(work.plan)
    estimate = make_estimate(work.plan, work.geometry, missing, more, config.out)
    estimate = replace(estimate, workers=work.world, left_out=work.left_out, sample_tokens=sample)
    return estimate, missing


def _load_target(config: ExtractConfig, device: torch.device) -> Target:
    settings: dict[str, Any] = {
        "taps": config.taps,
        "device": str(device),
        "dtype": choose_dtype(config.dtype, device),
        "trust_remote_code": config.trust_remote_code,
        "revision": config.revision,
        "allow_slow": config.allow_slow,
    }
    if config.stream_layers:
        target = StreamedTarget.stream(config.model, macro_rows=config.macro_rows, **settings)
        target.quiet = place_of_worker(config)[0] > 0
        return target
    if config.macro_rows is not None:
        raise UsageError("macro_rows means something only with stream_layers; give both or neither")
    return Target.load(config.model, **settings)


def _sample_tokens(work: Prepared) -> int:
    """How many tokens the creator of the cache runs before all others."""
    if not work.geometry.how.equalised:
        return 0
    return int(work.plan.doc_length[np.isin(work.plan.doc_row, sample_rows(work.plan))].sum())


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


def _manifest(config: ExtractConfig, work: Prepared) -> Manifest:
    return Manifest(
        geometry=work.geometry,
        taps=work.target.taps,
        identity=identity(config, work.target, work.tokenizer, work.plan),
        plan_digest=work.plan.digest(),
        versions=versions(),
    )


def _open_cache(
    config: ExtractConfig, work: Prepared, manifest: Manifest, report: Callable[[str], None]
) -> Cache:
    target = work.target

    def save_target(folder: Path) -> None:
        frozen = target.frozen()
        head = None if frozen.tied else frozen.head
        config_dict = target.config.to_dict()
        save_frozen(folder, frozen.embed, head, frozen.norm, config_dict, work.tokenizer)
        if work.geometry.how.equalised:
            scale = calibrate(target, work.plan, work.documents, config.batch_rows)
            save_channel_scale(folder, scale)

    return create_cache(
        config.out, manifest, work.plan, save_target, wait=config.wait, report=report
    )


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
