"""A small cache made through the real writer, without any target; its states can be learnt from."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from dflash_cache.cache import Cache, Manifest, create_cache, save_frozen
from dflash_cache.corpus import Document
from dflash_cache.encoding import get_encoding
from dflash_cache.equaliser import Calibration
from dflash_cache.packing import Plan, fill_row, make_plan
from dflash_cache.shard import Geometry, ShardWriter
from dflash_cache.target_files import save_channel_scale


def make_documents(count: int, length: int, vocab: int, *, seed: int = 0) -> list[Document]:
    """Documents that count upwards from a random token by a random stride: easy to predict."""
    rng = np.random.default_rng(seed)
    documents = []
    for line in range(1, count + 1):
        size = int(rng.integers(length // 2, length + 1))
        start, stride = int(rng.integers(vocab)), int(rng.integers(1, 4))
        ids = ((start + stride * np.arange(size)) % vocab).astype(np.int32)
        mask = np.ones(size, dtype=np.uint8)
        mask[: size // 8] = 0
        record = hashlib.sha256(ids.tobytes() + bytes([line % 256])).hexdigest()
        documents.append(Document(ids, mask, "tiny.jsonl", line, record))
    return documents


def states_of(input_ids: np.ndarray, embed: torch.Tensor, taps: int) -> torch.Tensor:
    """[S, T, D]: tap t is the embedding of the token t+1 places on, which a drafter can copy."""
    ids = torch.from_numpy(input_ids).long()
    return torch.stack([embed[ids.roll(-t - 1)] for t in range(taps)], dim=1)


def make_cache(
    path: Path,
    *,
    rows: int = 8,
    S: int = 64,
    T: int = 2,
    D: int = 32,
    vocab: int = 48,
    rows_per_shard: int = 4,
    heldout: float = 0.2,
    document_length: int = 24,
    embed_scale: float = 1.0,
    seed: int = 0,
    encoding: str = "bf16",
) -> Cache:
    """About `rows` rows of S tokens in shards; the last two ids of the vocabulary never occur.

    Smaller than a real one in every way but the format: plan, manifest, target files and shards
    are written by the code that `dflash extract` uses.
    """
    count = max(2, rows * S // (document_length * 3 // 4))
    documents = make_documents(count, document_length, vocab - 2, seed=seed)
    plan = make_plan(documents, seq_len=S, rows_per_shard=rows_per_shard, heldout=heldout)
    geometry = Geometry(S, rows_per_shard, T, D, encoding)
    generator = torch.Generator().manual_seed(seed)
    embed = embed_scale * torch.randn(vocab, D, generator=generator)
    taps = tuple(range(1, T + 1))
    manifest = Manifest(geometry, taps, {"target": "tiny", "seed": seed}, plan.digest())
    cache = create_cache(
        path, manifest, plan, lambda folder: _save_target(folder, embed, T, encoding)
    )
    for k in range(plan.shards):
        _write_shard(cache, plan, documents, embed, k)
    return cache


def _save_target(folder: Path, embed: torch.Tensor, T: int, encoding: str) -> None:
    vocab, D = embed.shape
    config = {
        "hidden_size": D,
        "intermediate_size": 2 * D,
        "num_hidden_layers": T + 3,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    save_frozen(folder, embed, None, torch.ones(D), config)
    tokenizer = {"model": {"vocab": {str(i): i for i in range(vocab - 2)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if get_encoding(encoding).equalised:
        calibration = Calibration()
        states = embed[None, :, None].expand(1, vocab, T, D)
        calibration.add(states, torch.ones(1, vocab, dtype=torch.int32))
        save_channel_scale(folder, calibration.result())


def _write_shard(
    cache: Cache, plan: Plan, documents: list[Document], embed: torch.Tensor, k: int
) -> None:
    rows = plan.shard_rows(k)
    final, staging, codec = cache.shard_path(k), cache.staging_dir, cache.codec()
    with ShardWriter(final, staging, cache.geometry, len(rows), codec) as writer:
        for i, row in enumerate(rows):
            tokens = fill_row(plan, documents, row)
            states = states_of(tokens.input_ids, embed, cache.geometry.taps)
            states[torch.from_numpy(tokens.document == 0)] = 0
            encoded = codec.encode(states)
            scales = None if encoded.scales is None else encoded.scales.numpy()
            writer.write_row(i, encoded.states.numpy(), tokens, scales=scales)
        writer.finish(
            {
                "shard": k,
                "row_range": [rows.start, rows.stop],
                "manifest_digest": cache.manifest.digest(),
            }
        )
