"""The autotuner's candidates compile side by side, before the first of them is timed."""

import threading

import pytest

from dflash_cache import tuning


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 8)


class Mode:
    """As Triton's AsyncCompileMode: what is queued is done when it is left."""

    def __init__(self, pool, *, ignore_errors):
        self.pool, self.ignore_errors = pool, ignore_errors
        Mode.active = None

    def __enter__(self):
        Mode.active = self
        self.futures = []
        return self

    def __exit__(self, *error):
        Mode.active = None
        for future in self.futures:
            if future.exception() is not None and not self.ignore_errors:
                raise future.exception()


class Kernel:
    """Compiles at once, or in the active mode's pool; `together` that many at the same moment."""

    def __init__(self, together):
        self.compiled, self.calls = {}, []
        self.meet = threading.Barrier(together, timeout=5)

    def run(self, *, warmup, x, grid, BLOCK):
        self.calls.append((BLOCK, warmup, x, grid))
        if BLOCK in self.compiled:
            return
        if Mode.active:
            Mode.active.futures.append(Mode.active.pool.submit(self._compile, BLOCK))
        else:
            self.compiled[BLOCK] = "alone"

    def _compile(self, block):
        self.meet.wait()  # breaks unless the candidates really are compiled together
        if block == 99:
            raise RuntimeError("out of shared memory")
        self.compiled[block] = "together"


class Config:
    def __init__(self, block):
        self.block = block

    def all_kwargs(self):
        return {"BLOCK": self.block}


def tuner_of(blocks, on_disk=False):
    """The parts of Triton's Autotuner that are changed, freshly changed."""

    class Tuner:
        def __init__(self):
            self.fn, self.nargs = Kernel(len(blocks)), {}

        def prune_configs(self, kwargs):
            return [Config(block) for block in blocks]

        def _bench(self, *args, config, **meta):
            self.fn.run(x=args[0], **{**meta, **config.all_kwargs()})
            return self.fn.compiled[config.block]

        def run(self, x, **kwargs):
            self.nargs = {"x": x}
            candidates = self.prune_configs(kwargs)
            if on_disk:
                return {}
            return {c.block: self._bench(x, config=c, **kwargs) for c in candidates}

    tuning._patch(Tuner, Mode)
    return Tuner()


def test_all_candidates_compile_at_once_and_then_each_is_timed():
    tuner = tuner_of([16, 32, 64])
    timed = tuner.run(7, grid=(1,), warmup=False)
    assert timed == {16: "together", 32: "together", 64: "together"}
    compiling, timing = tuner.fn.calls[:3], tuner.fn.calls[3:]
    assert compiling == [(block, True, 7, (1,)) for block in (16, 32, 64)]
    assert timing == [(block, False, 7, (1,)) for block in (16, 32, 64)]


def test_a_candidate_that_does_not_compile_is_left_to_its_timing():
    tuner = tuner_of([16, 99])
    assert tuner.run(7, grid=(1,), warmup=False) == {16: "together", 99: "alone"}


@pytest.mark.parametrize(("blocks", "on_disk"), [([16, 32], True), ([16], False)])
def test_a_result_on_disk_or_a_single_candidate_compiles_nothing_ahead(blocks, on_disk):
    tuner = tuner_of(blocks, on_disk)
    tuner.run(7, grid=(1,), warmup=False)
    assert not any(warmup for _, warmup, _, _ in tuner.fn.calls)


def test_a_later_shape_is_prepared_anew():
    tuner = tuner_of([16, 32])
    tuner.run(7, grid=(1,), warmup=False)
    tuner.fn.compiled.clear()
    assert set(tuner.run(8, grid=(1,), warmup=False).values()) == {"together"}
