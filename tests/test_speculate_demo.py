"""On the trained target that ships: outputs stay the same, and the drafter that ships gains."""

from pathlib import Path

import pytest
import torch

from dflash_cache.corpus import load_tokenizer, read_prompts
from dflash_train.checkpoint import load_drafter
from dflash_train.evaluate import EvalReport, evaluate, paired_gain
from dflash_train.speculate import Generation, Speculator, load_speculator, untrained_copy

DEMO = Path(__file__).parent.parent / "configs" / "demo"


@pytest.fixture(scope="module")
def shipped() -> Speculator:
    """The demo's target with the drafter that ships beside it."""
    return load_speculator(str(DEMO / "target"), DEMO / "drafter", device="cpu", dtype="float32")


REPORTS: dict[tuple[str, int, int], EvalReport] = {}
PLAIN: dict[tuple[int, int], list[Generation]] = {}  # the target alone, shared by both drafters


def decode_demo(shipped: Speculator, which: str, count: int, tokens: int) -> EvalReport:
    if (which, count, tokens) in REPORTS:
        return REPORTS[which, count, tokens]
    chosen = {
        "shipped": shipped,
        "random": shipped.with_drafter(untrained_copy(shipped.drafter)),
    }[which]
    tokenizer = load_tokenizer(str(DEMO / "target"))
    found = read_prompts(DEMO / "prompts.jsonl", tokenizer)[:count]
    assert len(found) == count
    prompts = [(p.line, p.input_ids.tolist()) for p in found]
    report = evaluate(chosen, prompts, tokens, PLAIN.get((count, tokens)))
    PLAIN[count, tokens] = [r.plain for r in report.results]
    REPORTS[which, count, tokens] = report
    return report


def check_demo(report: EvalReport, which: str) -> None:
    for result in report.results:
        assert result.speculative.tokens == result.plain.tokens, f"line {result.line}"
    assert report.identical == len(report.results)
    assert report.steps > 0
    if which == "random":
        assert report.tau < 1.3


@pytest.mark.parametrize("which", ["random", "shipped"])
def test_the_demo_gives_identical_outputs_on_4_prompts(shipped, which):
    check_demo(decode_demo(shipped, which, count=4, tokens=8), which)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["random", "shipped"])
def test_the_demo_gives_identical_outputs_on_20_prompts(shipped, which):
    check_demo(decode_demo(shipped, which, count=20, tokens=32), which)


@pytest.mark.slow
def test_the_shipped_drafter_has_the_acceptance_that_its_card_states(shipped):
    """2.7 over 64 tokens; the first 32 of each prompt alone are harder."""
    assert decode_demo(shipped, "shipped", 20, 32).tau > 2.2


@pytest.mark.slow
def test_the_shipped_drafter_gains_on_an_untrained_one(shipped):
    trained, random = (decode_demo(shipped, which, 20, 32) for which in ("shipped", "random"))
    gain, low, _ = paired_gain(trained, random)
    assert low > 0, f"mean gain in tau {gain:.2f}"


def test_the_shipped_drafter_is_the_demo_targets():
    drafter = load_drafter(DEMO / "drafter", "cpu", torch.float32)
    assert drafter.config.target_layer_ids == (0, 2, 4, 6, 7)
    assert drafter.config.block_size == 16
