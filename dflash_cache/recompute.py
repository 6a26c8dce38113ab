"""`dflash verify --recompute`: run documents of a cache through the target again and compare."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache
from dflash_cache.devices import choose_device, choose_dtype
from dflash_cache.errors import DataError, UsageError
from dflash_cache.identity import check_model_path, model_folder, target_identity
from dflash_cache.progress import progress
from dflash_cache.rowcheck import UNREADABLE, Place, places, skipped_documents, told
from dflash_cache.target import Target
from dflash_cache.verify import Recompute

# How far a document's states may be from the recomputed ones, as the mean over its tokens of
# |stored - recomputed| / |recomputed|, in the worst tap. Stored as bf16 they are off by 2^-9 at
# most (0.2 %). A target that runs in half precision gives other roundings alone than packed, and on
# another GPU or with other kernels: 1 to 3 % in late layers. int8 loses about 0.7 % more and fp8
# 2.1 %, twice that where a few channels dominate.
FULL_PRECISION, HALF_PRECISION = 1e-2, 5e-2
ENCODING = {"int8": 2e-2, "fp8": 5e-2}
# One token may be farther off than the mean (an expert chosen by a hair, a vector that is small),
# but never by half of its size, as a token that is another one, zero or scrambled is.
WORST, WORST_AT_MOST = 10.0, 0.5
# What must be equal of the target's identity. Its name, revision and precision may differ: the
# digests bind the contents.
BINDING = {"config_sha256": "config.json is not the one", "weights": "weights are not those"}


@dataclass
class RecomputeReport:
    """Errors per tap over all tokens of the recomputed documents; `failed` names bad documents.

    `mean`, `worst`: relative error of a token; `limit`, `worst_limit`: what a document may have.
    """

    model: str
    layers: list[int]
    dtype: str
    device: str
    kernels: str
    limit: float
    worst_limit: float
    documents: int = 0
    tokens: int = 0
    mean: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def render(self) -> str:
        """A line for the whole, one a tap."""
        lines = [
            f"recomputed {self.documents} documents, {self.tokens:,} tokens, with {self.model} in "
            f"{self.dtype} on {self.device} ({self.kernels}): {len(self.failed)} differ",
            f"  {'tap':>3}  {'layer':>5}  {'mean error':>10}  {'worst token':>11}"
            f"   (allowed: {self.limit:.0%} and {self.worst_limit:.0%} in a document)",
        ]
        for tap, (layer, mean, worst) in enumerate(
            zip(self.layers, self.mean, self.worst, strict=True)
        ):
            lines.append(f"  {tap:>3}  {layer:>5}  {mean:>10.3%}  {worst:>11.3%}")
        return "\n".join(lines)


def check_model(cache: Cache, ask: Recompute) -> None:
    """`UsageError` unless `ask.model` is the cache's target, bit for bit; loads no weights."""
    model, recorded = str(ask.model), _recorded(cache)
    check_model_path(model)
    folder = model_folder(model, ask.revision)
    found = target_identity(model, folder, ask.revision, torch.float32, "")
    for name, what in BINDING.items():
        if found[name] != recorded.get(name):
            raise UsageError(
                f"{model} is not the target of this cache: its {what} that manifest.json names for "
                f"{recorded.get('target')}; give the --model (and --revision) that the cache was "
                "extracted with"
            )
    choose_dtype(_dtype(cache, ask), choose_device(ask.device))


def _recorded(cache: Cache) -> dict[str, Any]:
    model = cache.manifest.identity.get("model")
    if not isinstance(model, dict):
        raise DataError(
            f"{cache.path / 'manifest.json'} names no target model, so that nothing can be "
            "recomputed; verify without --recompute"
        )
    return model


def _dtype(cache: Cache, ask: Recompute) -> str:
    return ask.dtype if ask.dtype != "auto" else str(_recorded(cache).get("dtype", "auto"))


def limits(encoding: str, dtypes: set[str]) -> tuple[float, float]:
    """(of a document's mean, of a single token), for the precisions that the target ran in."""
    base = FULL_PRECISION if dtypes == {"float32"} else HALF_PRECISION
    limit = base + ENCODING.get(encoding, 0.0)
    return limit, min(WORST * limit, WORST_AT_MOST)


def recompute_documents(cache: Cache, ask: Recompute, present: list[int]) -> RecomputeReport:
    """Compare `ask.count` documents of the shards `present` with the target's states, alone.

    A document that cannot be read, or whose states differ, is named in the report.
    """
    device = choose_device(ask.device)
    target = Target.load(
        str(ask.model),
        taps=cache.manifest.taps,
        device=str(device),
        dtype=choose_dtype(_dtype(cache, ask), device),
        trust_remote_code=ask.trust_remote_code,
        revision=ask.revision,
    )
    comparison = _Comparison(cache, target)
    chosen = _draw(cache, ask, present)
    with progress(len(chosen), "recompute", "documents") as bar:
        for row, document in chosen:
            comparison.add(row, document)
            bar.advance()
    return comparison.report(str(ask.model), str(device))


def _draw(cache: Cache, ask: Recompute, present: list[int]) -> list[tuple[int, Place]]:
    """(global row, document) of a seeded choice among those that are stored, by row."""
    plan = cache.plan
    there = np.flatnonzero(np.isin(plan.doc_row // plan.rows_per_shard, present))
    order = np.random.default_rng(ask.seed).permutation(there)
    chosen: list[tuple[int, Place]] = []
    for index in order:
        if len(chosen) == (ask.count or 0):
            break
        row, number = int(plan.doc_row[index]), int(plan.doc_number[index])
        document = next(p for p in places(plan, row, _skipped(cache, row)) if p.number == number)
        if not document.skipped:
            chosen.append((row, document))
    return sorted(chosen, key=lambda pair: (pair[0], pair[1].start))


def _skipped(cache: Cache, row: int) -> set[tuple[int, int]]:
    try:
        return skipped_documents(cache.locate(row)[0].attributes)
    except DataError:
        return set()  # the shard is damaged: comparing its documents will say how


class _Comparison:
    """Adds up errors per tap; a document over the limit, or unreadable, goes into `failed`."""

    def __init__(self, cache: Cache, target: Target):
        self.cache, self.target = cache, target
        dtypes = {str(_recorded(cache).get("dtype")), str(target.dtype).removeprefix("torch.")}
        self.limit, self.worst_limit = limits(cache.geometry.encoding, dtypes)
        taps = cache.geometry.taps
        self.total, self.worst = torch.zeros(taps, dtype=torch.float64), torch.zeros(taps)
        self.documents = self.tokens = 0
        self.failed: list[str] = []

    def add(self, row: int, document: Place) -> None:
        where = f"row {row} of the cache, {document.name}"
        try:
            shard, inside = self.cache.locate(row)
            file = shard.layouts[shard.geometry.how.arrays[0]].place(inside)[0]
            where = f"{file}: row {inside} ({where})"
            part = slice(document.start, document.stop)
            stored = self.cache.decoded_row(row)[part]
            ids = shard.read_tokens(inside).input_ids[part]
        except UNREADABLE as error:
            self.failed.append(f"{where}: cannot be compared: {told(error, 'it')}")
            return
        errors = token_errors(stored, self._run(ids))  # [L, T]
        self.documents, self.tokens = self.documents + 1, self.tokens + len(errors)
        self.total += errors.sum(0, dtype=torch.float64)
        self.worst = torch.maximum(self.worst, errors.amax(0))
        self.failed += [f"{where}: {wrong}" for wrong in self._judge(errors)]

    def _run(self, ids: np.ndarray) -> Tensor:
        """input_ids [L] -> the document's own states [L, T, D] in the target's dtype."""
        # On CUDA padded to a row: kernels are tuned for a shape, and one is enough.
        cuda = self.target.device.type == "cuda"
        length = self.cache.geometry.seq_len if cuda else len(ids)
        padded, document, position = (torch.zeros(1, length, dtype=torch.int64) for _ in range(3))
        padded[0, : len(ids)] = torch.from_numpy(ids)
        document[0, : len(ids)] = 1
        position[0, : len(ids)] = torch.arange(len(ids))
        return self.target.run_rows(padded, document, position)[0, : len(ids)].cpu()

    def _judge(self, errors: Tensor) -> Iterator[str]:
        """errors [L, T] -> a sentence, if the document is over a limit."""
        mean, (worst, place) = errors.mean(0), errors.max(0)
        # `not <=`, so that an error that is not a number fails.
        wrong = [t for t, e in enumerate(mean.tolist()) if not e <= self.limit]
        wrong += [t for t, e in enumerate(worst.tolist()) if not e <= self.worst_limit]
        if wrong:
            tap = wrong[0]
            yield (
                f"the states differ from recomputed ones by {float(mean[tap]):.2%} in tap {tap} "
                f"(allowed {self.limit:.0%}), at position {int(place[tap])} by "
                f"{float(worst[tap]):.2%} (allowed {self.worst_limit:.0%})"
            )

    def report(self, model: str, device: str) -> RecomputeReport:
        return RecomputeReport(
            model=model,
            layers=list(self.cache.manifest.taps),
            dtype=str(self.target.dtype).removeprefix("torch."),
            device=device,
            kernels=self.target.describe_kernels()[0].removeprefix("kernels: "),
            limit=self.limit,
            worst_limit=self.worst_limit,
            documents=self.documents,
            tokens=self.tokens,
            mean=(self.total / max(self.tokens, 1)).tolist(),
            worst=self.worst.tolist(),
            failed=self.failed,
        )


def token_errors(stored: Tensor, computed: Tensor) -> Tensor:
    """[L, T, D] each -> float32 [L, T]: |stored - computed| / |computed| of a token in a tap."""
    want = computed.float()
    size = want.norm(dim=-1).clamp(min=1e-30)
    return (stored.float() - want).norm(dim=-1) / size
