"""Triton's autotuner, with the candidates of a kernel compiled side by side before it times them.

A GatedDeltaNet target tunes about ten kernels of up to ten candidates on its first batch. Triton
compiles them one after another, for about a minute, on one core of many.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_THREADS = 16
_PATCHED = "_dflash_compiles_side_by_side"


def compile_side_by_side() -> bool:
    """Change Triton's autotuner so, once; False if this Triton cannot (then it just is slower)."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return False
    if not hasattr(Autotuner, _PATCHED):
        setattr(Autotuner, _PATCHED, True)
        _patch(Autotuner, AsyncCompileMode)
    return True


def _patch(tuner: Any, mode: Any) -> None:
    prune, bench = tuner.prune_configs, tuner._bench

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
        self._uncompiled = prune(self, kwargs)
        return self._uncompiled

    # Compiled only here, at the first timing: results that were found on disk need no candidate.
    def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        candidates, self._uncompiled = getattr(self, "_uncompiled", ()), ()
        if len(candidates) > 1:
            _compile(self, candidates, meta, mode)
        return bench(self, *args, config=config, **meta)

    tuner.prune_configs, tuner._bench = prune_configs, _bench


def _compile(tuner: Any, candidates: Sequence[Any], meta: dict[str, Any], mode: Any) -> None:
    """Into the kernel's own cache; a candidate that does not compile fails in its timing again."""
    threads = min(MAX_THREADS, len(candidates), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, mode(pool, ignore_errors=True):
        for config in candidates:
            # Everything by name, in the timing's order: the same entry of the kernel's cache.
            arguments = {**tuner.nargs, **meta, **config.all_kwargs(), "warmup": True}
            tuner.fn.run(**arguments)
