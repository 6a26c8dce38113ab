"""What a drafter is worth: its acceptance length in real, exact speculative decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_train.speculate import Generation, Speculator


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and speculatively.

    Attributes:
        line: the prompt's line in its file, 1-based.
        plain, speculative: the two generations.
        differs_at: index of the first token that differs, None if none does.
    """

    line: int
    plain: Generation
    speculative: Generation
    differs_at: int | None

    @property
    def tau(self) -> float:
        """Tokens a verify pass of this prompt; NaN if the prefill alone ended it."""
        return (
            float(np.mean(self.speculative.emitted)) if self.speculative.emitted else float("nan")
        )

    @property
    def margin(self) -> float | None:
        """Where the outputs part: the target's lead there, in logits. Near 0 is a tie."""
        return None if self.differs_at is None else self.plain.margins[self.differs_at]


@dataclass(frozen=True)
class EvalReport:
    """Decoding of a set of prompts; tau counts the bonus token.

    Attributes:
        results: one for each prompt.
        block_size: K of the drafter.
    """

    results: list[PromptResult]
    block_size: int

    @property
    def steps(self) -> int:
        return sum(len(r.speculative.emitted) for r in self.results)

    @property
    def tau(self) -> float:
        """Tokens a verify pass over all prompts: the sum of tokens over the sum of passes."""
        return sum(sum(r.speculative.emitted) for r in self.results) / max(self.steps, 1)

    @property
    def identical(self) -> int:
        return sum(r.differs_at is None for r in self.results)

    def tau_interval(self) -> tuple[float, float]:
        """95 % interval of tau, by resampling the prompts."""
        passes = np.array([len(r.speculative.emitted) for r in self.results], dtype=np.float64)
        tokens = np.array([sum(r.speculative.emitted) for r in self.results], dtype=np.float64)
        draws = _resamples(len(self.results))
        sums = tokens[draws].sum(1) / np.maximum(passes[draws].sum(1), 1)
        return _interval(sums)

    def acceptance_by_position(self) -> list[float]:
        """For slot k = 1..K-1, the share of passes that accepted the drafted token there."""
        emitted = np.array([e for r in self.results for e in r.speculative.emitted])
        slots = range(1, self.block_size)
        return [float(np.mean(emitted > k)) if len(emitted) else 0.0 for k in slots]

    def speeds(self) -> tuple[float, float]:
        """Tokens a second after the prefill: speculative, plain."""
        return (
            _speed([r.speculative for r in self.results]),
            _speed([r.plain for r in self.results]),
        )

    def speedup(self) -> float:
        """Speculative speed over plain speed; NaN if every prompt ended with its first token."""
        speculative, plain = self.speeds()
        return speculative / plain if plain else float("nan")

    def render(self) -> str:
        """The report for a person."""
        low, high = self.tau_interval()
        speculative, plain = self.speeds()
        by_slot = " ".join(f"{100 * share:.0f}" for share in self.acceptance_by_position())
        draft = sum(r.speculative.draft_seconds for r in self.results)
        verify = sum(r.speculative.verify_seconds for r in self.results)
        lines = [
            f"prompts: {len(self.results)}, verify passes: {self.steps}",
            f"tau: {self.tau:.2f} tokens a pass, bonus included (95 %: {low:.2f} to {high:.2f})",
            f"accepted at slot 1..{self.block_size - 1}: {by_slot} %",
            f"speed: {speculative:,.1f} tokens/s speculative, {plain:,.1f} plain "
            f"({self.speedup():.2f}x), of it draft {draft:.1f} s, verify {verify:.1f} s",
            f"identical outputs: {self.identical}/{len(self.results)}",
        ]
        lines += [
            f"  line {r.line} parts at token {r.differs_at}, where the target's best token leads "
            f"by {r.margin:.2g} logits"
            for r in self.results
            if r.differs_at is not None
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """The report for `--json`."""
        speculative, plain = self.speeds()
        return {
            "prompts": len(self.results),
            "tau": self.tau,
            "tau_95": list(self.tau_interval()),
            "passes": self.steps,
            "acceptance_by_position": self.acceptance_by_position(),
            "tokens_per_second": {"speculative": speculative, "plain": plain},
            "draft_seconds": sum(r.speculative.draft_seconds for r in self.results),
            "verify_seconds": sum(r.speculative.verify_seconds for r in self.results),
            "identical": self.identical,
            "differences": [
                {"line": r.line, "at": r.differs_at, "margin": r.margin}
                for r in self.results
                if r.differs_at is not None
            ],
        }


def evaluate(
    speculator: Speculator,
    prompts: Sequence[tuple[int, Sequence[int]]],
    max_new_tokens: int,
    plain: Sequence[Generation] | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> EvalReport:
    """Decode every prompt both ways.

    Args:
        speculator: target, drafter and stop tokens.
        prompts: `(line, token ids)` pairs.
        max_new_tokens: the most tokens that a prompt may give.
        plain: the plain generations, if another drafter's evaluation has made them already.
        advance: told the number of new tokens after each prompt.
    """
    results = []
    for index, (line, ids) in enumerate(prompts):
        prompt = torch.tensor(list(ids), device=speculator.device)
        base = plain[index] if plain else speculator.plain(prompt, max_new_tokens)
        drafted = speculator.generate(prompt, max_new_tokens)
        results.append(PromptResult(line, base, drafted, _first_difference(base, drafted)))
        advance(len(drafted.tokens))
    return EvalReport(results, speculator.drafter.config.block_size)


def paired_gain(better: EvalReport, base: EvalReport) -> tuple[float, float, float]:
    """Mean over prompts of the difference in tau, and its 95 % interval (low, high)."""
    gains = np.array(
        [b.tau - a.tau for b, a in zip(better.results, base.results, strict=True)], dtype=np.float64
    )
    gains = gains[~np.isnan(gains)]
    if len(gains) == 0:
        raise ValueError("no prompt gave a second token, so there is no tau to compare")
    low, high = _interval(gains[_resamples(len(gains))].mean(1))
    return float(gains.mean()), low, high


def _first_difference(plain: Generation, drafted: Generation) -> int | None:
    if plain.tokens == drafted.tokens:
        return None
    pairs = enumerate(zip(plain.tokens, drafted.tokens, strict=False))
    shorter = min(len(plain.tokens), len(drafted.tokens)) - 1
    return next((i for i, (a, b) in pairs if a != b), shorter)


def _speed(generations: list[Generation]) -> float:
    tokens = sum(len(g.tokens) - 1 for g in generations)  # the first came with the prefill
    return tokens / max(sum(g.decode_seconds for g in generations), 1e-9)


def _resamples(n: int, draws: int = 10_000) -> np.ndarray:
    """Indices of bootstrap samples of n things, always the same ones: `[draws, n]`."""
    return np.random.default_rng(0).integers(0, n, size=(draws, n))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
