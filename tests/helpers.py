"""What several tests need: a tiny real tokenizer, documents, and a small cache on the disk."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_cache.cache import Cache, Manifest, create_cache, save_frozen
from dflash_cache.corpus import Document
from dflash_cache.packing import RowTokens, fill_row, make_plan
from dflash_cache.shard import Geometry, ShardWriter

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A tokenizer turns text into numbers; numbers are what a model reads and writes.",
    "What is the answer? The answer is forty-two. What was the question, then?",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 400 tokens; ChatML unless another template is given."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_documents(lengths: list[int], vocab: int = 300, seed: int = 0) -> list[Document]:
    """Documents of these lengths with random ids and masks, one record each."""
    rng = np.random.default_rng(seed)
    return [
        Document(
            input_ids=rng.integers(0, vocab, length).astype(np.int32),
            loss_mask=(rng.random(length) < 0.7).astype(np.uint8),
            source="corpus.jsonl",
            line=i + 1,
            record=f"record {i}",
        )
        for i, length in enumerate(lengths)
    ]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """uint16 bf16 bits of normal numbers."""
    values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def make_cache(
    path: Path,
    *,
    lengths: tuple[int, ...] = (20, 30, 9, 14, 32, 7, 25, 11),
    seq_len: int = 32,
    rows_per_shard: int = 2,
    taps: tuple[int, ...] = (1, 3),
    hidden: int = 8,
    heldout: float = 0.25,
    skip: tuple[int, ...] = (),
) -> Cache:
    """A small complete cache of random states (the shards in `skip` are left out)."""
    documents = make_documents(list(lengths))
    plan = make_plan(documents, seq_len=seq_len, rows_per_shard=rows_per_shard, heldout=heldout)
    geometry = Geometry(seq_len, rows_per_shard, len(taps), hidden)
    manifest = Manifest(geometry, taps, {"target": "tiny", "heldout": heldout}, plan.digest())
    tokenizer = tiny_tokenizer()

    def save_target(folder: Path) -> None:
        embed = torch.randn(len(tokenizer), hidden, generator=torch.Generator().manual_seed(0))
        config = {"hidden_size": hidden, "vocab_size": len(tokenizer), "model_type": "tiny"}
        save_frozen(folder, embed.bfloat16(), None, torch.ones(hidden), config, tokenizer)

    cache = create_cache(path, manifest, plan, save_target)
    for k in cache.missing():
        if k not in skip:
            _write_shard(cache, documents, k)
    return cache


def _write_shard(cache: Cache, documents: list[Document], k: int) -> None:
    rows = cache.plan.shard_rows(k)
    rng = np.random.default_rng(k)
    with ShardWriter(cache.shard_path(k), cache.staging_dir, cache.geometry, len(rows)) as writer:
        for i, row in enumerate(rows):
            tokens = fill_row(cache.plan, documents, row)
            states = random_bits(rng, cache.geometry.row_shape)
            states[tokens.document == 0] = 0
            writer.write_row(i, states, tokens)
        writer.finish(
            {
                "shard": k,
                "row_range": [rows.start, rows.stop],
                "manifest_digest": cache.manifest.digest(),
                "kernels": ["layer 0: torch reference"],
                "versions": {"torch": torch.__version__},
                "skipped": [],
            }
        )


GEOMETRY = Geometry(seq_len=16, rows_per_shard=3, taps=2, hidden=4)


def row_of(i: int, used: int = 12) -> tuple[np.ndarray, RowTokens]:
    """Row `i` of the small shard: two documents and a padded tail."""
    rng = np.random.default_rng(i)
    document = np.where(np.arange(16) < used, 1 + (np.arange(16) >= used // 2), 0).astype(np.int32)
    tokens = RowTokens(
        input_ids=np.where(document > 0, rng.integers(1, 300, 16), 0).astype(np.int32),
        loss_mask=(document == 1).astype(np.uint8),
        document=document,
        position=np.where(document > 0, np.arange(16) % (used // 2), 0).astype(np.int32),
    )
    states = random_bits(rng, GEOMETRY.row_shape)
    states[document == 0] = 0
    return states, tokens


def write_shard(root: Path, rows: int = 3, attributes: dict | None = None) -> Path:
    """The small shard, `shards/000007.zarr` below `root`."""
    writer = ShardWriter(root / "shards" / "000007.zarr", root / "staging", GEOMETRY, rows)
    with writer:
        for i in range(rows):
            writer.write_row(i, *row_of(i))
        return writer.finish({"shard": 7, "skipped": []} | (attributes or {}))
