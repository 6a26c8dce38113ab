"""What the report of an evaluation says, on generations made by hand."""

import json
import math

import pytest
import torch

from dflash_train.evaluate import EvalReport, PromptResult, evaluate, paired_gain
from dflash_train.speculate import Generation

K = 4


def plain_of(tokens: list[int], seconds: float = 2.0) -> Generation:
    margins = [float(i + 1) for i in range(len(tokens))]
    return Generation(tokens, margins, verify_seconds=seconds)


def drafted_of(tokens: list[int], emitted: list[int]) -> Generation:
    return Generation(
        tokens, [0.5] * len(tokens), emitted, 0.1, draft_seconds=0.25, verify_seconds=0.75
    )


def result(line: int, emitted: list[int], differs_at: int | None = None) -> PromptResult:
    tokens = list(range(1 + sum(emitted)))
    return PromptResult(line, plain_of(tokens), drafted_of(tokens, emitted), differs_at)


def report(*emitted: list[int]) -> EvalReport:
    return EvalReport([result(i + 1, e) for i, e in enumerate(emitted)], K)


class Scripted:
    """A speculator that answers from a list, and counts what it was asked."""

    class drafter:
        class config:
            block_size = K

    device = torch.device("cpu")

    def __init__(self, plain: list[list[int]], drafted: list[list[int]]):
        self.plains, self.drafts = iter(plain), iter(drafted)
        self.plain_calls: list[list[int]] = []
        self.limits: list[int] = []

    def plain(self, prompt: torch.Tensor, max_new_tokens: int) -> Generation:
        self.plain_calls.append(prompt.tolist())
        return plain_of(next(self.plains))

    def generate(self, prompt: torch.Tensor, max_new_tokens: int) -> Generation:
        self.limits.append(max_new_tokens)
        tokens = next(self.drafts)
        return drafted_of(tokens, [1] * (len(tokens) - 1))


PROMPTS = [(3, [7, 8]), (5, [9])]


def test_tau_is_all_tokens_over_all_passes_and_not_the_mean_of_prompts():
    made = report([4, 4, 4, 4], [1])
    assert made.steps == 5
    assert made.tau == 17 / 5
    assert [r.tau for r in made.results] == [4.0, 1.0]


def test_a_prompt_that_ended_with_the_prefill_has_no_tau_and_moves_none():
    made = report([3, 1], [])
    assert math.isnan(made.results[1].tau)
    assert made.tau == 2.0


def test_the_interval_contains_tau_and_is_the_same_every_time():
    made = report([4, 2, 1], [1, 1, 1, 1], [3, 3], [2, 4, 4], [1, 2])
    low, high = made.tau_interval()
    assert low < made.tau < high
    assert low >= 1
    assert high <= K
    assert made.tau_interval() == (low, high)


def test_the_interval_of_like_prompts_has_no_width():
    assert report([2, 2], [2, 2], [2, 2]).tau_interval() == (2.0, 2.0)


def test_more_prompts_give_a_narrower_interval():
    few, many = report([4], [1]), report(*[[4], [1]] * 50)
    assert few.tau == many.tau == 2.5
    (low, high), (lower, higher) = few.tau_interval(), many.tau_interval()
    assert higher - lower < (high - low) / 3


def test_acceptance_by_position_counts_passes_and_never_rises():
    made = report([4, 1], [2, 3])
    assert made.acceptance_by_position() == [0.75, 0.5, 0.25]
    # The bonus and the accepted ones add up to tau.
    assert 1 + sum(made.acceptance_by_position()) == made.tau
    assert report([1, 1]).acceptance_by_position() == [0.0] * (K - 1)
    assert report([]).acceptance_by_position() == [0.0] * (K - 1)


def test_both_ways_of_decoding_are_compared_prompt_by_prompt():
    speculator = Scripted([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]])
    told: list[int] = []
    made = evaluate(speculator, PROMPTS, 16, advance=told.append)  # type: ignore[arg-type]
    assert made.identical == 2
    assert [r.line for r in made.results] == [3, 5]
    assert [r.differs_at for r in made.results] == [None, None]
    assert [r.margin for r in made.results] == [None, None]
    assert made.block_size == K
    assert speculator.plain_calls == [[7, 8], [9]]
    assert speculator.limits == [16, 16]
    assert told == [3, 2]


def test_a_difference_is_found_at_its_first_token_with_the_targets_lead_there():
    speculator = Scripted([[1, 2, 3, 4], [4, 5]], [[1, 2, 9, 8], [4, 5]])
    made = evaluate(speculator, PROMPTS, 16)  # type: ignore[arg-type]
    first, second = made.results
    assert first.differs_at == 2
    assert first.margin == 3.0  # plain's margin of token 2, not the drafted one's 0.5
    assert second.differs_at is None
    assert made.identical == 1
    assert "identical outputs: 1/2" in made.render()
    assert "line 3 parts at token 2" in made.render()
    assert "leads by 3 logits" in made.render()
    assert made.to_dict()["differences"] == [{"line": 3, "at": 2, "margin": 3.0}]


@pytest.mark.parametrize("drafted", [[1, 2], [1, 2, 3, 4, 5]])
def test_an_output_that_is_only_a_part_of_the_other_is_not_identical(drafted):
    made = evaluate(Scripted([[1, 2, 3, 4]], [drafted]), PROMPTS[:1], 16)  # type: ignore[arg-type]
    assert made.identical == 0
    assert made.results[0].margin is not None
    assert "parts at" in made.render()


def test_plain_generations_of_another_evaluation_are_reused():
    first = evaluate(Scripted([[1, 2], [4, 5]], [[1, 2], [4, 5]]), PROMPTS, 16)  # type: ignore[arg-type]
    again = Scripted([], [[1, 2], [4, 6]])
    made = evaluate(again, PROMPTS, 16, [r.plain for r in first.results])  # type: ignore[arg-type]
    assert again.plain_calls == []
    assert [r.plain for r in made.results] == [r.plain for r in first.results]
    assert [r.differs_at for r in made.results] == [None, 1]


def test_the_gain_is_the_mean_difference_prompt_by_prompt():
    base = report([1, 1], [1], [2, 2], [1])
    better = report([3, 3], [2], [4, 4], [2])
    gain, low, high = paired_gain(better, base)
    assert gain == (2 + 1 + 2 + 1) / 4
    assert 1 <= low < gain < high <= 2


def test_a_gain_that_every_prompt_has_is_certain_however_the_prompts_vary():
    base, better = report([1], [2], [3]), report([2], [3], [4])
    assert paired_gain(better, base) == (1.0, 1.0, 1.0)
    assert paired_gain(base, base) == (0.0, 0.0, 0.0)


def test_prompts_without_a_pass_are_left_out_of_the_gain():
    gain, low, high = paired_gain(report([2], []), report([1], []))
    assert (gain, low, high) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no tau to compare"):
        paired_gain(report([]), report([]))


def test_reports_of_other_prompts_are_not_paired():
    with pytest.raises(ValueError):
        paired_gain(report([1], [2]), report([1]))


def test_speed_counts_decoding_alone():
    made = report([4, 4], [2])
    # 8 + 2 tokens after the first ones; 1 s a prompt drafted, 2 s plain; the prefill's 0.1 s is out
    assert made.speeds() == (10 / 2, 10 / 4)
    assert made.speedup() == 2.0


def test_the_report_is_json_and_says_all_that_is_measured():
    made = report([4, 1], [2, 3], [])
    read = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert read["prompts"] == read["identical"] == 3
    assert (read["tau"], read["passes"]) == (2.5, 4)
    assert read["tau_95"] == list(made.tau_interval())
    assert read["acceptance_by_position"] == [0.75, 0.5, 0.25]
    assert read["tokens_per_second"] == {"speculative": 10 / 3, "plain": 10 / 6}
    assert (read["draft_seconds"], read["verify_seconds"]) == (0.75, 2.25)
    assert read["differences"] == []


def test_a_person_reads_tau_speed_and_identical_outputs():
    text = report([4, 1], [2, 3]).render()
    assert "prompts: 2, verify passes: 4" in text
    assert "tau: 2.50 tokens a pass, bonus included (95 %: 2.50 to 2.50)" in text
    assert "accepted at slot 1..3: 75 50 25 %" in text
    assert "(2.00x)" in text
    assert "identical outputs: 2/2" in text
    assert "parts at" not in text


def test_answers_of_one_token_each_still_give_a_report():
    made = report([], [])
    assert made.tau == 0.0
    assert math.isnan(made.speedup())
    assert "identical outputs: 2/2" in made.render()
    json.dumps(made.to_dict(), allow_nan=False)
