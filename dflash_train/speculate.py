"""Draft, verify, roll back: greedy speculative decoding that emits what the target alone would.

One step drafts K-1 tokens in one pass of the drafter, runs them through the target together with
the anchor, keeps the longest prefix that the target agrees with, and takes the target's own next
token as the new anchor. The target's state is rolled back to the kept tokens, its GatedDeltaNet
layers by replay (`dflash_cache.decoding`), so nothing of a rejected token remains.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dflash_cache.decoding import Step, TargetDecoder, load_decoder
from dflash_cache.errors import UsageError
from dflash_train.checkpoint import load_drafter
from dflash_train.drafter import Drafter, DrafterConfig


@dataclass(frozen=True)
class Generation:
    """What one prompt gave.

    Attributes:
        tokens: the new token ids, a stop token included.
        margins: for each of `tokens`, the target's logit of it minus its second best logit.
        emitted: tokens that each verify pass added (accepted drafts + the bonus token), cut where
            the output ends; empty for plain decoding. Their mean is the acceptance length tau.
        prefill_seconds, draft_seconds, verify_seconds: wall clock of the parts.
    """

    tokens: list[int]
    margins: list[float]
    emitted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prefill: what decoding itself took."""
        return self.draft_seconds + self.verify_seconds


class DraftContext:
    """The drafter's keys and values of the verified tokens, in buffers that never move.

    Args:
        drafter: the drafter; its layers give the number and the shape of the buffers.
        capacity: the most tokens that will ever be verified (prompt + new).
    """

    def __init__(self, drafter: Drafter, capacity: int):
        self.drafter, self.capacity, self.length = drafter, capacity, 0
        self.buffers: list[tuple[Tensor, Tensor]] = []  # per layer k, v: [1, KV, capacity, h]

    def append(self, taps: Tensor) -> None:
        """Add verified tokens; `taps` is `[n, T, D]`, the target's states of them."""
        end = self.length + taps.shape[0]
        positions = torch.arange(self.length, end, device=taps.device)[None]
        fresh = self.drafter.context_kv(taps[None], positions)
        if not self.buffers:
            self.buffers = [(self._buffer(k), self._buffer(v)) for k, v in fresh]
        for (keys, values), (k, v) in zip(self.buffers, fresh, strict=True):
            keys[:, :, self.length : end] = k
            values[:, :, self.length : end] = v
        self.length = end

    def _buffer(self, like: Tensor) -> Tensor:
        shape = (*like.shape[:2], self.capacity, like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Per layer the filled part of keys and values, each `[1, KV, length, h]`."""
        return [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in self.buffers]


class Speculator:
    """A target's decoder and a drafter for it, ready to generate.

    Args:
        decoder: the target's decoder; its embedding and head serve the drafter too.
        drafter: a drafter trained on this target's taps, in the target's dtype.
    """

    def __init__(self, decoder: TargetDecoder, drafter: Drafter):
        self.decoder, self.drafter = decoder, drafter
        self.stop_ids = frozenset(decoder.stop_ids)
        self.device = decoder.head.device
        config = drafter.config
        self.mask_ids = torch.full((config.block_size,), config.mask_token_id, device=self.device)

    def describe(self) -> str:
        """The kernels that the target decodes with, one line."""
        return self.decoder.describe()

    def with_drafter(self, drafter: Drafter) -> "Speculator":
        """The same target with another drafter of the same taps."""
        return Speculator(self.decoder, drafter)

    def with_drafter_from(self, folder: Path) -> "Speculator":
        """The same target with the drafter in `folder`; UsageError if that does not fit or has
        other taps."""
        head, config = self.decoder.head, self.drafter.config
        drafter = load_drafter(folder, head.device, head.dtype)
        _check_fits(folder, drafter.config, self.decoder)
        if drafter.config.target_layer_ids != config.target_layer_ids:
            raise UsageError(
                f"{folder} reads taps {list(drafter.config.target_layer_ids)}, the drafter loaded "
                f"before it {list(config.target_layer_ids)}: evaluate them one by one"
            )
        return self.with_drafter(drafter)

    @torch.no_grad()
    def plain(self, prompt: Tensor, max_new_tokens: int) -> Generation:
        """Greedy decoding by the target alone, one token a pass; `prompt` is `[n]` token ids."""
        started = self._clock()
        logits = self._prefill(prompt).logits[-1:]
        prefilled = self._clock()
        tokens, margins = _greedy(logits)
        while not self._ended(tokens, max_new_tokens):
            step = self.decoder.verify(torch.tensor(tokens[-1:], device=self.device))
            token, margin = _greedy(step.logits)
            tokens, margins = tokens + token, margins + margin
        took = self._clock() - prefilled
        return Generation(tokens, margins, [], prefilled - started, 0.0, took)

    @torch.no_grad()
    def generate(self, prompt: Tensor, max_new_tokens: int) -> Generation:
        """Greedy speculative decoding; the same tokens as `plain`, up to near-ties of logits.

        Args:
            prompt: `[n]` token ids, n >= 1.
            max_new_tokens: where the output ends if no stop token came before.
        """
        marks = [self._clock()]
        prefill = self._prefill(prompt)
        capacity = prompt.shape[0] + max_new_tokens + self.drafter.config.block_size
        context = DraftContext(self.drafter, capacity)
        context.append(prefill.taps)
        tokens, margins = _greedy(prefill.logits[-1:])
        marks.append(self._clock())
        emitted, draft_seconds, verify_seconds = [], 0.0, 0.0
        while not self._ended(tokens, max_new_tokens):
            began = self._clock()
            block = self._draft(context, tokens[-1])
            drafted = self._clock()
            fresh, fresh_margins = self._verify(context, block)
            fresh = self._cut(fresh, max_new_tokens - len(tokens))
            tokens, margins = tokens + fresh, margins + fresh_margins[: len(fresh)]
            emitted.append(len(fresh))
            verified = self._clock()
            draft_seconds += drafted - began
            verify_seconds += verified - drafted
        prefill_seconds = marks[1] - marks[0]
        return Generation(tokens, margins, emitted, prefill_seconds, draft_seconds, verify_seconds)

    def _prefill(self, prompt: Tensor) -> Step:
        if prompt.ndim != 1 or prompt.shape[0] < 1:
            raise ValueError(f"a prompt is [n] token ids with n >= 1, not {tuple(prompt.shape)}")
        self.decoder.reset()
        return self.decoder.prefill(prompt)

    def _draft(self, context: DraftContext, anchor: int) -> Tensor:
        """The anchor and the K-1 tokens drafted after it: `[K]`."""
        block = self.mask_ids.clone()
        block[0] = anchor
        noise = self.decoder.embed(block)[None]  # [1, K, D]
        first = context.length
        positions = torch.arange(first, first + block.shape[0], device=self.device)[None]
        hidden = self.drafter.draft(noise, positions, context.views())  # [1, K, D]
        block[1:] = (hidden[0, 1:] @ self.decoder.head.T).argmax(-1)
        return block

    def _verify(self, context: DraftContext, block: Tensor) -> tuple[list[int], list[float]]:
        """Run `block` `[K]` through the target, keep what it agrees with; the new tokens."""
        step = self.decoder.verify(block)
        agreed = step.logits.argmax(-1)  # [K]: the target's token after each of the block
        matches = (agreed[:-1] == block[1:]).int().cumprod(0)
        accepted = int(matches.sum())
        self.decoder.rollback(accepted + 1)
        context.append(step.taps[: accepted + 1])
        return _greedy(step.logits[: accepted + 1])

    def _ended(self, tokens: list[int], max_new_tokens: int) -> bool:
        return len(tokens) >= max_new_tokens or tokens[-1] in self.stop_ids

    def _cut(self, fresh: list[int], room: int) -> list[int]:
        """`fresh` up to the first stop token and to `room` tokens."""
        fresh = fresh[:room]
        ends = [i for i, token in enumerate(fresh) if token in self.stop_ids]
        return fresh[: ends[0] + 1] if ends else fresh

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """Argmax of each row of `[m, V]`, and by how much it leads the second best."""
    best = logits.float().topk(2, dim=-1)
    margins = best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0].tolist(), margins.tolist()


def load_speculator(
    model: str,
    drafter: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Speculator:
    """Load a target and a drafter that belong together.

    Args:
        model: the target's folder or hub id.
        drafter: the drafter's folder.
        device: cuda, cpu or auto (CUDA if there is any).
        dtype: float32, bfloat16 or auto (float32 on the CPU, bfloat16 on CUDA), of both models.

    Raises UsageError if either is missing, or if the drafter was made for a target of another
    size or reads taps that this target does not have.
    """
    loaded = load_drafter(drafter, "cpu", torch.float32)
    decoder = load_decoder(
        model,
        taps=loaded.config.target_layer_ids,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    _check_fits(drafter, loaded.config, decoder)
    return Speculator(decoder, loaded.to(device=decoder.head.device, dtype=decoder.head.dtype))


def untrained_copy(drafter: Drafter, seed: int = 0) -> Drafter:
    """A drafter of the same shape with fresh random weights, the floor of any comparison."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = Drafter(drafter.config)
    weight = drafter.fc.weight
    return fresh.to(device=weight.device, dtype=weight.dtype).eval()


def _check_fits(folder: Path, config: DrafterConfig, decoder: TargetDecoder) -> None:
    wanted = {
        "vocab_size": decoder.head.shape[0],
        "hidden_size": decoder.head.shape[1],
        "num_target_layers": decoder.target.num_layers,
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UsageError(
                f"the drafter in {folder} has {name} {getattr(config, name)}, the target {value}: "
                "it was trained for another target"
            )
