"""Rows whose checksums agree and whose contents cannot be true: the plan, padding, the states."""

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache
from dflash_cache.encoding import ENCODINGS, Codec
from dflash_cache.quicklook import suspect_bits, suspects
from dflash_cache.verify import verify
from tests import tiny_cache
from tests.altering import alter_states, alter_tokens, edit_attributes, make_checksums_agree
from tests.helpers import make_cache

TOKENS = ("input_ids", "loss_mask", "document", "position")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "hs")


def check(path):
    return verify(path, report=lambda line: None)


def bits_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16))


@pytest.mark.parametrize(
    ("value", "channels", "named"),
    [
        (float("nan"), 1, "non-finite states"),
        (float("-nan"), 1, "non-finite states"),
        (float("inf"), 1, "non-finite states"),
        (float("-inf"), 8, "non-finite states"),
        (0.0, 8, "all-zero states"),
        (-0.0, 8, "all-zero states"),
        (1.5, 8, "constant states"),
        (-2.0, 8, "constant states"),
    ],
)
def test_states_that_no_model_has_are_found_though_every_checksum_agrees(
    cache, value, channels, named
):
    row = 3
    place = int(cache.plan.doc_start[cache.plan.row_documents(row)[0]]) + 4
    line = int(cache.plan.doc_line[cache.plan.row_documents(row)[0]])

    def change(bits: np.ndarray) -> None:
        bits[place, 1, :channels] = bits_of(value)

    file = alter_states(cache, row, change)
    assert check(cache.path).problems == [
        f"{file}: row 1 (row 3 of the cache), document 1 (line {line} of the corpus): {named}"
    ]


def test_zeros_of_both_signs_are_zeros_and_numbers_of_both_signs_are_not():
    vectors = torch.tensor([[0.0, -0.0], [1.0, -1.0], [-1.0, -2.0], [0.0, -1.0], [-0.0, 1.0]])
    bits = vectors.bfloat16().view(torch.uint16).numpy()
    assert suspect_bits(bits).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_fast_look_misses_no_token_that_decodes_to_something_wrong(encoding):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 2, 40, generator=generator)
    states[3, 1], states[5, 0], states[7, 0, :16] = 0.0, 2.5, 0.0
    channels = 0.5 + torch.rand(2, 40, generator=generator)
    codec = Codec(encoding, channels if encoding == "int8" else None)
    stored, scales = codec.encode(states)
    if scales is None:
        stored[11, 0, 39], stored[13, 1, 39] = 0x7F81, 0xFF80
    else:
        scales[11, 0], scales[13, 1], scales[15, 0], scales[17, 1] = np.nan, np.inf, 1e38, 0.0
    if encoding == "fp8":
        stored[19, 0, 39], stored[21, 1, 39] = 0x7F, 0xFF
    decoded = codec.decode(stored, scales).float()
    flat = (decoded.amax(-1) == decoded.amin(-1)).any(-1)
    wrong = (flat | ~decoded.isfinite().flatten(1).all(1)).numpy()
    assert 3 <= wrong.sum() <= 9
    arrays = (stored.numpy(), encoding, None if scales is None else scales.numpy())
    found = suspects(*arrays, channels if encoding == "int8" else None)
    assert found[wrong].all()
    assert (found & ~wrong).sum() <= 2


@pytest.mark.parametrize("encoding", ["fp8", "bf16-lossless"])
def test_states_of_other_encodings_are_judged_as_decoded(tmp_path, encoding):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding=encoding, embed_scale=0.0)
    problems = check(cache.path).problems
    assert len(problems) == cache.plan.documents
    assert all("all-zero states" in problem for problem in problems)


@pytest.mark.parametrize(("value", "named"), [(np.nan, "non-finite"), (0.0, "all-zero")])
def test_a_scale_that_is_not_a_number_or_zero_is_found_in_the_states_it_makes(
    tmp_path, value, named
):
    cache = tiny_cache.make_cache(tmp_path / "hs", encoding="int8")
    layout = cache.shard(0).layouts["scales"]
    scales = np.fromfile(layout.place(0)[0], "<f4").reshape(layout.shape)
    scales[2, 7, 1] = value
    layout.place(0)[0].write_bytes(scales.tobytes())
    make_checksums_agree(cache.shard_path(0))
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{cache.shard_path(0)}/states/c.2.0.0.0: row 2 (row 2 of the cache)")
    assert problem.endswith(f"{named} states")


def test_states_in_the_padding_are_found(cache):
    row = int(np.flatnonzero(np.bincount(cache.plan.doc_row, cache.plan.doc_length) < 32)[0])

    def change(bits: np.ndarray) -> None:
        bits[-1, 0, 0] = bits_of(1.0)

    file = alter_states(cache, row, change)
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{file}: row {row % 2} (row {row} of the cache)")
    assert problem.endswith("states are not zero where no document lies")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("document", "the array `document` has not"),
        ("position", "do not count from 0 to"),
        ("input_ids", "are not those that the plan was made from"),
        ("loss_mask", "are not those that the plan was made from"),
    ],
)
def test_tokens_that_are_not_the_plans_are_found_though_every_checksum_agrees(cache, name, named):
    def change(values: np.ndarray) -> None:
        values[2] ^= 1

    alter_tokens(cache, name, 2, change)
    (problem,) = check(cache.path).problems
    assert problem.startswith(f"{cache.shard_path(1)}: row 0 (row 2 of the cache), document ")
    assert named in problem


def test_tokens_in_the_padding_are_found(cache):
    row = int(np.flatnonzero(np.bincount(cache.plan.doc_row, cache.plan.doc_length) < 32)[0])
    alter_tokens(cache, "input_ids", row, lambda values: values.__setitem__(-1, 5))
    (problem,) = check(cache.path).problems
    assert problem.endswith("input_ids is not zero where no document lies")


def blank_document(cache: Cache, row: int, *, told: bool) -> None:
    """Make the first document of a row padding, as extraction does with unusable states."""
    index = cache.plan.row_documents(row)[0]
    start, length = int(cache.plan.doc_start[index]), int(cache.plan.doc_length[index])
    part = slice(start, start + length)
    alter_states(cache, row, lambda bits: bits.__setitem__(part, 0))
    for name in TOKENS:
        alter_tokens(cache, name, row, lambda values: values.__setitem__(part, 0))

    def tell(attributes: dict) -> None:
        attributes["documents"] -= 1
        number = int(cache.plan.doc_number[index])
        entry = {"row": row, "document": number, "start": start, "stop": start + length}
        attributes["skipped"] = [{**entry, "line": 1, "reason": "all-zero states"}] if told else []

    edit_attributes(cache.locate(row)[0].path, tell)


def test_a_document_that_was_left_out_is_expected_to_be_padding(cache):
    blank_document(cache, 0, told=True)
    report = check(cache.path)
    assert report.problems == []
    assert (report.documents, report.skipped) == (7, 1)
    assert "1 documents were left out" in report.render()


def test_a_document_that_is_gone_without_a_word_is_a_problem(cache):
    blank_document(cache, 0, told=False)
    problems = check(cache.path).problems
    assert any("documents and 0 skipped, the plan has" in p for p in problems)
    assert any("the array `document` has not" in p for p in problems)
