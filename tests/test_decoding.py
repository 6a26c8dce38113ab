"""Decoding with own states: continuing, and taking tokens back exactly."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_cache.decoding import FIRST_CAPACITY, TargetDecoder
from dflash_cache.errors import UsageError
from dflash_cache.target import Target
from tests.tiny_models import VOCAB, kimi_config, save_model, tiny_dense, tiny_hybrid

FAMILIES = ["qwen3_5", "qwen3", "llama", "sliding", "kimi_linear"]
PROMPT, BLOCK = 19, 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    sliding = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    return {
        "qwen3_5": tiny_hybrid(root / "hybrid"),
        "qwen3": tiny_dense(root / "qwen3", "qwen3"),
        "llama": tiny_dense(root / "llama", "llama"),
        "kimi_linear": save_model(root / "kimi", kimi_config()),
        "sliding": tiny_dense(root / "sliding", "qwen3", use_sliding_window=True, **sliding),
    }


@pytest.fixture(scope="module")
def targets(folders) -> dict[str, Target]:
    return {name: Target.load(str(f), taps=[0, 1, 3], full=True) for name, f in folders.items()}


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have - want).norm() / want.norm())


def greedy(decoder: TargetDecoder, prompt: torch.Tensor, n: int) -> list[int]:
    step, out = decoder.prefill(prompt), []
    while len(out) < n:
        out.append(int(step.logits[-1].argmax()))
        step = decoder.verify(torch.tensor(out[-1:]))
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate_of_transformers(folders, targets, family):
    plain = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    prompt = tokens(PROMPT)
    with torch.no_grad():
        want = plain.generate(
            prompt[None], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert greedy(TargetDecoder(targets[family]), prompt, 24) == want[0, PROMPT:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_verified_block_gives_what_a_prefill_of_all_gives(targets, family):
    decoder, whole = TargetDecoder(targets[family]), TargetDecoder(targets[family])
    prompt, block = tokens(PROMPT), tokens(BLOCK, seed=1)
    first = decoder.prefill(prompt)
    step = decoder.verify(block)
    want = whole.prefill(torch.cat([prompt, block]))
    assert step.logits.shape == (BLOCK, VOCAB)
    assert step.taps.shape == (BLOCK, 3, 32)
    assert relative(torch.cat([first.taps, step.taps]), want.taps) < 1e-5
    assert relative(step.logits[-1:], want.logits) < 1e-5
    assert decoder.length == whole.length == PROMPT + BLOCK


@pytest.mark.parametrize("keep", range(BLOCK + 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rolled_back_state_is_that_of_a_fresh_prefill(targets, family, keep):
    decoder, fresh = TargetDecoder(targets[family]), TargetDecoder(targets[family])
    prompt, block, after = tokens(PROMPT), tokens(BLOCK, seed=1), tokens(5, seed=2)
    decoder.prefill(prompt)
    decoder.verify(block)
    decoder.rollback(keep)
    fresh.prefill(torch.cat([prompt, block[:keep]]))
    assert decoder.length == fresh.length == PROMPT + keep
    for index, layer in fresh._states.recurrent.items():
        mine = decoder._states.recurrent[index]
        assert relative(mine.state, layer.state) < 1e-5
        assert relative(mine.conv, layer.conv) < 1e-5
    have, want = decoder.verify(after), fresh.verify(after)
    assert relative(have.taps, want.taps) < 1e-5
    assert relative(have.logits, want.logits) < 1e-5


def test_keeping_nothing_restores_the_very_same_state(targets):
    decoder = TargetDecoder(targets["qwen3_5"])
    decoder.prefill(tokens(PROMPT))
    before = {i: (s.conv.clone(), s.state.clone()) for i, s in decoder._states.recurrent.items()}
    decoder.verify(tokens(BLOCK, seed=1))
    decoder.rollback(0)
    for index, (conv, state) in before.items():
        assert torch.equal(decoder._states.recurrent[index].conv, conv)
        assert torch.equal(decoder._states.recurrent[index].state, state)


def test_many_blocks_with_rollbacks_end_where_one_prefill_ends(targets):
    decoder, fresh = TargetDecoder(targets["qwen3_5"]), TargetDecoder(targets["qwen3_5"])
    kept = [tokens(3)]
    decoder.prefill(kept[0])
    for i, keep in enumerate([0, 1, 2, 7, 8, 3, 8, 1]):  # blocks shorter than the convolution too
        block = tokens(BLOCK, seed=10 + i)
        decoder.verify(block)
        decoder.rollback(keep)
        kept.append(block[:keep])
    last = decoder.verify(tokens(2, seed=99))
    fresh.prefill(torch.cat(kept))
    want = fresh.verify(tokens(2, seed=99))
    assert relative(last.logits, want.logits) < 1e-5


def test_a_prompt_shorter_than_the_convolution_works(targets):
    decoder, fresh = TargetDecoder(targets["qwen3_5"]), TargetDecoder(targets["qwen3_5"])
    ids = tokens(6)
    decoder.prefill(ids[:1])
    step = decoder.verify(ids[1:])
    assert relative(step.logits[-1:], fresh.prefill(ids).logits) < 1e-5


def test_key_value_memory_grows_without_changing_what_it_holds(targets):
    decoder, fresh = TargetDecoder(targets["qwen3"]), TargetDecoder(targets["qwen3"])
    ids = tokens(FIRST_CAPACITY + 40)
    decoder.prefill(ids[: FIRST_CAPACITY - 2])
    decoder.verify(ids[FIRST_CAPACITY - 2 : -10])
    decoder.rollback(len(ids) - 10 - FIRST_CAPACITY + 2)
    step = decoder.verify(ids[-10:])
    assert relative(step.logits[-1:], fresh.prefill(ids).logits) < 1e-5


def test_two_sequences_of_one_target_do_not_meet(targets):
    one, other = TargetDecoder(targets["qwen3_5"]), TargetDecoder(targets["qwen3_5"])
    one.prefill(tokens(PROMPT))
    other.prefill(tokens(PROMPT, seed=5))
    again = TargetDecoder(targets["qwen3_5"])
    again.prefill(tokens(PROMPT))
    assert torch.equal(one.verify(tokens(4)).logits, again.verify(tokens(4)).logits)


def test_prefill_starts_anew(targets):
    decoder = TargetDecoder(targets["qwen3_5"])
    first = decoder.prefill(tokens(PROMPT))
    decoder.verify(tokens(BLOCK))
    again = decoder.prefill(tokens(PROMPT))
    assert torch.equal(first.logits, again.logits)
    assert decoder.length == PROMPT


@pytest.mark.parametrize("keep", [-1, BLOCK + 1])
def test_keeping_more_than_the_block_is_refused(targets, keep):
    decoder = TargetDecoder(targets["qwen3"])
    decoder.prefill(tokens(PROMPT))
    decoder.verify(tokens(BLOCK))
    with pytest.raises(UsageError, match=f"cannot keep {keep} .* {BLOCK}"):
        decoder.rollback(keep)


def test_a_block_is_taken_back_only_once(targets):
    decoder = TargetDecoder(targets["qwen3_5"])
    decoder.prefill(tokens(PROMPT))
    with pytest.raises(UsageError, match="has 0"):
        decoder.rollback(1)
    decoder.verify(tokens(BLOCK))
    decoder.rollback(2)
    with pytest.raises(UsageError, match="has 0"):
        decoder.rollback(1)


def test_a_cut_target_cannot_decode(folders):
    with pytest.raises(UsageError, match="full=True"):
        TargetDecoder(Target.load(str(folders["qwen3"]), taps=[0]))


@pytest.mark.parametrize("ids", [torch.zeros(0, dtype=torch.long), torch.zeros(1, 3).long()])
def test_ids_must_be_a_list_of_tokens(targets, ids):
    with pytest.raises(UsageError, match="one list"):
        TargetDecoder(targets["qwen3"]).prefill(ids)


def test_embeddings_are_the_targets(targets):
    decoder = TargetDecoder(targets["qwen3"])
    ids = tokens(4)
    assert torch.equal(decoder.embed(ids), targets["qwen3"].frozen().embed[ids])
