"""Speculative decoding emits what the target alone emits, whatever is drafted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_cache.decoding import TargetDecoder, load_decoder
from dflash_cache.errors import UsageError
from dflash_train.checkpoint import save_drafter
from dflash_train.drafter import Drafter, DrafterConfig, default_config
from dflash_train.speculate import Speculator, load_speculator, untrained_copy
from tests.drafting import tiny_drafter
from tests.tiny_models import VOCAB, tiny_dense, tiny_hybrid

FAMILIES = ["hybrid", "dense"]
BLOCKS = [4, 8, 16]
TAPS = (0, 1, 3)


class Scripted:
    """Stands for a drafter: proposes what `propose(position)` says follows the anchor there.

    `states` collects the taps that it was given, `anchors` the positions that it drafted from.
    """

    def __init__(self, head: Tensor, config: DrafterConfig, propose: Callable[[int], list[int]]):
        self.head, self.config, self.propose = head, config, propose
        self.states: list[Tensor] = []
        self.anchors: list[int] = []
        self.stored = 0

    def context_kv(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        n = taps.shape[1]
        assert positions.tolist() == [list(range(self.stored, self.stored + n))]
        self.stored += n
        self.states.append(taps[0])
        return [(positions[:, None, :, None].float(),) * 2]

    def draft(self, noise: Tensor, q_positions: Tensor, context: list) -> Tensor:
        first = int(q_positions[0, 0])
        keys = context[0][0]
        assert keys.flatten().tolist() == list(range(first))  # all verified tokens, no other
        self.anchors.append(first)
        ids = (self.propose(first) + [0] * self.config.block_size)[: self.config.block_size - 1]
        return torch.cat([torch.zeros_like(noise[:, :1]), self.head[ids][None]], dim=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {"hybrid": tiny_hybrid(root / "hybrid"), "dense": tiny_dense(root / "qwen3", "qwen3")}


@pytest.fixture(scope="module")
def decoders(folders) -> dict[str, TargetDecoder]:
    """Heads with rows of one length: a row is then the state that its own token wins."""
    made = {name: load_decoder(str(f), taps=TAPS, device="cpu") for name, f in folders.items()}
    for decoder in made.values():
        rows = decoder.head.norm(dim=1, keepdim=True)
        decoder.head.div_(rows / rows.mean())
        assert torch.equal((decoder.head @ decoder.head.T).argmax(1), torch.arange(VOCAB))
    return made


def shape(decoder: TargetDecoder, block_size: int = 8) -> DrafterConfig:
    config = decoder.target.config.to_dict()
    return default_config(config, TAPS, layers=2, mask_token_id=VOCAB - 1, block_size=block_size)


def prompt_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


CONTINUATIONS: dict[tuple, list[int]] = {}


def continuation(decoder: TargetDecoder, prompt: Tensor) -> list[int]:
    key = (id(decoder), *prompt.tolist())
    if key not in CONTINUATIONS:
        drafter = Drafter(shape(decoder))
        CONTINUATIONS[key] = Speculator(decoder, drafter).plain(prompt, 64).tokens
    return CONTINUATIONS[key]


def scripted(
    decoder: TargetDecoder, block_size: int, prompt: Tensor, right: Sequence[int]
) -> tuple[Speculator, Scripted, list[int]]:
    """A drafter whose n-th block is right in its first `right[n]` slots, and wrong from there on.

    With the speculator and the drafter comes the target's own continuation, 64 tokens.
    """
    config = shape(decoder, block_size)
    truth = continuation(decoder, prompt)
    blocks = iter(list(right) * 64)

    def propose(position: int) -> list[int]:
        start = position - len(prompt) + 1
        ahead, good = truth[start : start + block_size - 1], next(blocks)
        return ahead[:good] + [(token + 1) % VOCAB for token in ahead[good:]]

    stub = Scripted(decoder.head, config, propose)
    return Speculator(decoder, stub), stub, truth  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 21])
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_drafter_changes_no_token(decoders, family, block_size, length):
    drafter = tiny_drafter(shape(decoders[family], block_size)).eval()
    speculator = Speculator(decoders[family], drafter)
    plain = speculator.plain(prompt_of(length), 24)
    drafted = speculator.generate(prompt_of(length), 24)
    assert len(plain.tokens) == 24
    assert drafted.tokens == plain.tokens
    assert drafted.margins == pytest.approx(plain.margins, abs=1e-3)
    assert 1 + sum(drafted.emitted) == 24
    assert plain.emitted == []


@pytest.mark.parametrize("length", [1, 17])
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_oracle_gets_a_whole_block_a_pass(decoders, family, block_size, length):
    prompt = prompt_of(length)
    speculator, stub, truth = scripted(decoders[family], block_size, prompt, [block_size - 1])
    drafted = speculator.generate(prompt, 1 + 3 * block_size)
    assert drafted.emitted == [block_size] * 3
    assert drafted.tokens == truth[: 1 + 3 * block_size]
    assert stub.anchors == [length + block_size * i for i in range(3)]


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adversary_gets_one_token_a_pass(decoders, family, block_size):
    prompt = prompt_of(9)
    speculator, _, truth = scripted(decoders[family], block_size, prompt, [0])
    drafted = speculator.generate(prompt, 20)
    assert drafted.emitted == [1] * 19
    assert drafted.tokens == truth[:20]


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_kept_up_to_its_first_wrong_token(decoders, family, block_size):
    prompt, right = prompt_of(6), [0, 3, 1, 2, 3, 0, 2]
    speculator, stub, truth = scripted(decoders[family], block_size, prompt, right)
    total = 1 + sum(n + 1 for n in right)
    drafted = speculator.generate(prompt, total)
    assert drafted.emitted == [n + 1 for n in right]
    assert drafted.tokens == truth[:total]
    # What the drafter was given of the target is what the target has of these tokens alone.
    given = torch.cat(stub.states)
    ids = torch.cat([prompt, torch.tensor(drafted.tokens[:-1])])
    want = TargetDecoder(decoders[family].target).prefill(ids).taps
    assert given.shape == want.shape
    assert float((given - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_max_new_tokens_cuts_inside_a_block(decoders, family):
    prompt = prompt_of(5)
    for most in (1, 2, 3, 8, 9, 10, 13):
        speculator, _, truth = scripted(decoders[family], 8, prompt, [7])
        drafted = speculator.generate(prompt, most)
        assert drafted.tokens == truth[:most] == speculator.plain(prompt, most).tokens
        assert len(drafted.margins) == most
        assert drafted.emitted == [n for n in (min(most - 1, 8), most - 9) if n > 0]


@pytest.mark.parametrize("at", [0, 1, 2, 5, 8, 9, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_token_ends_the_output_inside_a_block(decoders, family, at, monkeypatch):
    prompt, block_size = fresh_token_at(decoders[family], at), 8
    speculator, _, truth = scripted(decoders[family], block_size, prompt, [7])
    settings = decoders[family].target.model.generation_config
    monkeypatch.setattr(settings, "eos_token_id", [truth[at], VOCAB + 5])
    stopping = Speculator(decoders[family], speculator.drafter)
    drafted = stopping.generate(prompt, 40)
    assert drafted.tokens == truth[: at + 1] == stopping.plain(prompt, 40).tokens
    assert len(drafted.margins) == at + 1
    assert sum(drafted.emitted) == at
    assert len(drafted.emitted) == -(-at // block_size)


def fresh_token_at(decoder: TargetDecoder, at: int) -> Tensor:
    """A prompt whose continuation has a token at index `at` that has not come before."""
    for seed in range(50):
        prompt = prompt_of(7, seed)
        tokens = continuation(decoder, prompt)
        if tokens.index(tokens[at]) == at:
            return prompt
    raise AssertionError("all of these continuations repeat themselves")


def test_the_next_prompt_knows_nothing_of_the_last(decoders):
    speculator = Speculator(decoders["hybrid"], tiny_drafter(shape(decoders["hybrid"])).eval())
    first = speculator.generate(prompt_of(5), 12)
    speculator.generate(prompt_of(30, seed=1), 12)
    again = speculator.generate(prompt_of(5), 12)
    assert (again.tokens, again.emitted) == (first.tokens, first.emitted)


@pytest.mark.parametrize("wrong", [torch.zeros(0, dtype=torch.long), torch.zeros(1, 4).long()])
def test_what_is_no_prompt_is_refused(decoders, wrong):
    speculator = Speculator(decoders["dense"], Drafter(shape(decoders["dense"])))
    for decode in (speculator.plain, speculator.generate):
        with pytest.raises(ValueError, match=r"a prompt is \[n\] token ids"):
            decode(wrong, 8)


def test_an_untrained_copy_has_the_shape_and_other_weights(decoders):
    drafter = tiny_drafter(shape(decoders["dense"])).double()
    state = torch.get_rng_state()
    copy, twin, other = untrained_copy(drafter), untrained_copy(drafter), untrained_copy(drafter, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert copy.config == drafter.config
    assert copy.fc.weight.dtype == torch.float64
    assert torch.equal(copy.fc.weight, twin.fc.weight)
    assert not torch.equal(copy.fc.weight, other.fc.weight)
    assert not torch.equal(copy.fc.weight, drafter.fc.weight)


@pytest.fixture
def saved(decoders, tmp_path) -> Callable[..., Path]:
    """Saves a drafter for the dense target with some fields changed; its folder."""

    def save(**changes) -> Path:
        config = replace(shape(decoders["dense"]), **changes)
        return save_drafter(tmp_path / "drafter", Drafter(config))

    return save


MISFITS = [
    ("vocab_size", {"vocab_size": VOCAB + 1}),
    ("hidden_size", {"hidden_size": 48}),
    ("num_target_layers", {"num_target_layers": 36}),
]


def test_a_drafter_that_fits_is_loaded_in_the_targets_dtype(folders, saved):
    speculator = load_speculator(str(folders["dense"]), saved(), device="cpu")
    assert speculator.drafter.fc.weight.dtype == speculator.decoder.head.dtype == torch.float32
    assert not speculator.drafter.training
    assert speculator.decoder.target.taps == TAPS
    assert speculator.describe()
    assert len(speculator.generate(prompt_of(3), 5).tokens) == 5


@pytest.mark.parametrize(("field", "changes"), MISFITS, ids=[name for name, _ in MISFITS])
def test_a_drafter_of_another_target_is_refused_by_the_field(folders, saved, field, changes):
    with pytest.raises(UsageError, match=f"{field} {changes[field]}, the target"):
        load_speculator(str(folders["dense"]), saved(**changes), device="cpu")


@pytest.mark.parametrize(("field", "changes"), MISFITS, ids=[name for name, _ in MISFITS])
def test_a_second_drafter_of_another_target_is_refused_too(decoders, saved, field, changes):
    speculator = Speculator(decoders["dense"], Drafter(shape(decoders["dense"])))
    with pytest.raises(UsageError, match=field):
        speculator.with_drafter_from(saved(**changes))


def test_taps_that_the_target_lacks_are_refused(folders, saved):
    changes = {"target_layer_ids": (0, 9), "num_target_layers": 12}
    with pytest.raises(UsageError, match="tap 9 does not exist: the target has 4 layers"):
        load_speculator(str(folders["dense"]), saved(**changes), device="cpu")


def test_a_second_drafter_must_read_the_same_taps(decoders, saved):
    speculator = Speculator(decoders["dense"], Drafter(shape(decoders["dense"])))
    with pytest.raises(UsageError, match=r"reads taps \[0, 2\].*\[0, 1, 3\]"):
        speculator.with_drafter_from(saved(target_layer_ids=(0, 2)))
    other = speculator.with_drafter_from(saved(block_size=4))
    assert other.decoder is speculator.decoder
    assert other.mask_ids.shape == (4,)


def test_a_folder_without_a_model_or_a_drafter_is_refused(folders, saved, tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_speculator(str(tmp_path / "none" / "model"), saved(), device="cpu")
    with pytest.raises(UsageError, match="is no drafter"):
        load_speculator(str(folders["dense"]), tmp_path, device="cpu")
