"""The promise after the warm-up: a recompile is counted, and stops a strict run."""

import warnings

import pytest
import torch

from dflash_train.steady import Steady, SteadyError, _sync_warnings


def compiled():
    """A new function each time, so that dynamo's cache of another test does not hide a compile."""
    torch._dynamo.reset()
    return torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)


def test_no_recompile_is_reported_as_such():
    steady, function = Steady(torch.device("cpu")), compiled()
    function(torch.ones(3))
    steady.arm()
    for number in range(4):
        with steady.step(number):
            function(torch.ones(3))
    steady.close()
    assert steady.counts.recompiles == 0
    assert "0 recompiles in 4 steps" in steady.summary()
    assert "CUDA only" in steady.summary()


def test_a_recompile_after_the_warm_up_is_counted_and_named():
    steady, function = Steady(torch.device("cpu")), compiled()
    function(torch.ones(3))
    steady.arm()
    with steady.step(7):
        function(torch.ones(4))
    steady.close()
    assert steady.counts.recompiles == 1
    assert "step 7 moved" in steady.first_violation
    assert "recompile" in steady.first_violation


def test_strict_stops_at_a_recompile():
    steady, function = Steady(torch.device("cpu"), strict=True), compiled()
    function(torch.ones(3))
    steady.arm()
    with (
        pytest.raises(SteadyError, match=r"step 9 .*recompile.*TORCH_LOGS=recompiles"),
        steady.step(9),
    ):
        function(torch.ones(5))
    steady.close()


def test_a_lazily_compiled_backward_is_seen_too():
    steady = Steady(torch.device("cpu"))
    torch._dynamo.reset()
    function = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager", dynamic=False)
    with torch.no_grad():
        function(torch.ones(3))
    steady.arm()
    with steady.step(1):
        function(torch.ones(3, requires_grad=True)).backward()
    steady.close()
    assert steady.counts.recompiles >= 1


def test_nothing_is_counted_in_the_warm_up_or_after_closing():
    steady, function = Steady(torch.device("cpu"), strict=True), compiled()
    with steady.step(0):
        function(torch.ones(3))
    steady.close()
    function(torch.ones(4))
    assert steady.counts.steps == 0
    assert "within the warm-up" in steady.summary()


def test_sync_warnings_are_collected_and_others_passed_on():
    found: list[str] = []
    with pytest.warns(UserWarning, match="something else"):
        _warn_twice(found)
    assert len(found) == 1


def _warn_twice(found: list[str]) -> None:
    with _sync_warnings(found):
        warnings.warn("called a synchronizing CUDA operation (Triggered ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
