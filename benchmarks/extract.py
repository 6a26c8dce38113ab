"""Extraction of a random-weight target against plain transformers, all in one run.

    python benchmarks/extract.py --dir /data/tmp            # Qwen3.5-4B's shape, one GPU
    python benchmarks/extract.py --dir /tmp/x --tiny        # a smoke test on a CPU

Tokens a second: plain transformers (B=8, S=2048, no padding at all), the same without the layers
after the last tap, ours without writing (packed rows of log-normal documents; only real tokens
count), ours with writing (int8 shards on --dir), and the torch reference of one batch.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from dflash_cache.cache import Cache, Manifest, create_cache, save_frozen
from dflash_cache.corpus import Document
from dflash_cache.equaliser import calibrate
from dflash_cache.estimate import first_batch
from dflash_cache.extract_job import Job
from dflash_cache.geometry import Geometry
from dflash_cache.kernels import ATTENTION
from dflash_cache.loading import cut_config
from dflash_cache.packing import Plan, make_plan
from dflash_cache.selfcheck import prove, prove_compiled
from dflash_cache.stopping import StopSignals
from dflash_cache.taps import default_taps
from dflash_cache.target import Target
from dflash_cache.target_files import save_channel_scale

FULL = {"layers": 32, "hidden": 2560, "intermediate": 9216, "heads": 16, "vocab": 248_320}
TINY = {"layers": 8, "hidden": 64, "intermediate": 128, "heads": 2, "vocab": 512}
SEQ_LEN, BATCH_ROWS, PLAIN = 4096, 4, (8, 2048)


def target_config(size: dict[str, int], tiny: bool) -> Qwen3_5TextConfig:
    """Three GatedDeltaNet layers to one of full attention, as Qwen3.5-4B has them."""
    head = 32 if tiny else 128
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return Qwen3_5TextConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=max(1, size["heads"] // 4),
        head_dim=32 if tiny else 256,
        linear_num_key_heads=size["heads"],
        linear_num_value_heads=2 * size["heads"],
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        linear_conv_kernel_dim=4,
        layer_types=kinds * (size["layers"] // 4),
        tie_word_embeddings=True,
        max_position_embeddings=262_144,
    )


def documents_of(tokens: int, vocab: int, seq_len: int) -> list[Document]:
    """Log-normal lengths as of shared chats: median 700 tokens, at most a row."""
    rng, found, total = np.random.default_rng(0), list[Document](), 0
    while total < tokens:
        length = int(np.clip(rng.lognormal(np.log(700 * seq_len / 4096), 1.0), 2, seq_len))
        ids = rng.integers(0, vocab, length).astype(np.int32)
        line = len(found) + 1
        found.append(Document(ids, np.ones(length, np.uint8), "random", line, f"{line:064x}"))
        total += length
    return found


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median over the runs after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def build(config: Any, device: torch.device, attention: str) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def plain_speed(config: Any, device: torch.device, shape: tuple[int, int]) -> float:
    """transformers as it comes, on a batch without padding: its decoder, without the head."""
    model = build(config, device, "sdpa")
    ids = torch.randint(0, config.vocab_size, shape, device=device)

    def forward() -> None:
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False)

    return ids.numel() / seconds_of(forward, device)


def make_cache(folder: Path, target: Target, plan: Plan, documents: list[Document]) -> Cache:
    geometry = Geometry(plan.seq_len, plan.rows_per_shard, len(target.taps), target.hidden, "int8")
    manifest = Manifest(geometry, target.taps, {"target": "random"}, plan.digest())

    def save_target(place: Path) -> None:
        frozen = target.frozen()
        save_frozen(place, frozen.embed, None, frozen.norm, target.config.to_dict())
        save_channel_scale(place, calibrate(target, plan, documents, BATCH_ROWS))

    return create_cache(folder, manifest, plan, save_target)


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), required=True, help="For shards.")
@click.option("--tokens", default=2_000_000, show_default=True, help="Corpus to extract.")
@click.option("--tiny", is_flag=True, help="A small shape, for a CPU.")
@click.option("--reference/--no-reference", default=True, help="Time the torch reference too.")
def main(folder: Path, tokens: int, tiny: bool, reference: bool) -> None:
    """Print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, seq_len = (TINY, 256) if tiny else (FULL, SEQ_LEN)
    config, taps = target_config(size, tiny), default_taps(size["layers"], 5)
    shape = (2, 128) if tiny else PLAIN
    rates: dict[str, float] = {}
    rates["plain transformers, all layers"] = plain_speed(config, device, shape)
    cut = cut_config(config, taps[-1] + 1)
    rates[f"plain transformers, {taps[-1] + 1} layers"] = plain_speed(cut, device, shape)
    target = Target("random", build(cut, device, ATTENTION), config, taps, device)
    documents = documents_of(tokens if not tiny else 20_000, size["vocab"], seq_len)
    plan = make_plan(documents, seq_len=seq_len, rows_per_shard=12, heldout=0.0)
    batch = first_batch(target, plan, documents, range(BATCH_ROWS), BATCH_ROWS)
    real = int((batch[1] != 0).sum())
    print(prove(target))
    rates["ours, uncompiled, not written"] = real / seconds_of(
        lambda: target.run_rows(*batch), device
    )
    if reference:
        rates["torch reference"] = real / seconds_of(
            lambda: target.run_rows(*batch, fused=False), device, repeats=1
        )
    print(prove_compiled(target, batch))
    rates["ours, compiled, not written"] = real / seconds_of(
        lambda: target.run_rows(*batch), device
    )
    shutil.rmtree(folder / "hs", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(
        make_cache(folder / "hs", target, plan, documents), target, documents, BATCH_ROWS, print
    )
    started = time.monotonic()
    job.run(0, 1, StopSignals())
    summary = job.summary(time.monotonic() - started)
    rates["ours, int8 shards written"] = summary.tokens_per_second
    print(summary.render())
    print(f"row fill {plan.fill:.2%}, so padding {1 - plan.fill:.2%} of what the target runs")
    base = rates["plain transformers, all layers"]
    for name, rate in rates.items():
        print(f"{name:<36} {rate:>10,.0f} tokens/s   {rate / base:5.2f}x of plain")
    written = rates["ours, int8 shards written"] / rates["ours, compiled, not written"]
    print(f"written / not written: {written:.1%}")
    shutil.rmtree(folder / "hs")


if __name__ == "__main__":
    main()
