"""docs/format.md: the numpy that it shows reads what the code writes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_cache import make_cache

DOC = Path(__file__).parent.parent / "docs" / "format.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)


def code_for(encoding: str) -> str:
    plain, int8, fp8 = BLOCKS
    if encoding == "bf16":
        return plain
    if encoding == "int8":
        return int8
    shared = [line for line in int8.splitlines() if "channel" not in line]
    return "\n".join([*shared, fp8])


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8"])
def test_the_documented_numpy_gives_the_states(tmp_path, monkeypatch, encoding):
    cache = make_cache(tmp_path / "hs", encoding=encoding, rows=6)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code_for(encoding), names)
    states = torch.from_numpy(names["states"].astype(np.float32)).to(torch.bfloat16)
    assert torch.equal(states, cache.decoded_row(2))
    assert names["states"].any()


def test_the_document_names_every_encoding_with_its_arrays():
    text = DOC.read_text()
    for name in ("bf16", "int8", "fp8", "bf16-lossless", "states_hi", "states_lo", "scales"):
        assert f"`{name}`" in text
