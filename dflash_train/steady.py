"""After the warm-up: no recompile, no device allocation, no host sync; says so, or stops."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._dynamo.callback import callback_handler

QUIET_STEPS = 4
_SYNC_TEXT = "synchronizing CUDA operation"


class SteadyError(RuntimeError):
    """A step after the warm-up recompiled, allocated device memory or synchronised (exit 1)."""


@dataclass
class SteadyCounts:
    """What the steps since `Steady.arm` did."""

    steps: int = 0
    recompiles: int = 0
    device_allocations: int = 0
    syncs: int = 0


class Steady:
    """Counts what must not happen after the warm-up; with `strict` the first one stops the run.

    Wrap each step in `with steady.step(n):`. Log lines, evaluations' reads and checkpoints stay
    outside, where a sync is allowed; an allocation or compile there is found at the next step.
    On the CPU only recompiles are counted: memory there is the system's and there is no sync.
    """

    def __init__(self, device: torch.device, *, strict: bool = False):
        self.cuda = device.type == "cuda"
        self.device, self.strict = device, strict
        self.counts = SteadyCounts()
        self.armed = False
        self.first_violation = ""
        self._compiles: list[str] = []
        self._allocations = self._quiet = 0

    def close(self) -> None:
        """Take the compile hook out again; the counts stay."""
        if self._on_compile in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._on_compile)

    def _on_compile(self, *event: object) -> None:
        self._compiles.append(" ".join(str(e) for e in event) or "a graph")

    def settle(self) -> None:
        """Give the warm-up's leftovers back; then run steps until `settled`."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self._quiet, self._allocations = 0, self._device_allocations()

    def settled(self) -> bool:
        """Call after each step; True once QUIET_STEPS in a row allocated nothing.

        The allocator cuts its segments anew after `settle`, and needs a few steps until the pieces
        that one step leaves fit the next.
        """
        before, self._allocations = self._allocations, self._device_allocations()
        self._quiet = self._quiet + 1 if self._allocations == before else 0
        return self._quiet >= QUIET_STEPS

    def arm(self) -> None:
        """Take the baseline: from here on the promise holds."""
        if not self.armed:
            # Dynamo calls this for the forward and for the backward, which compiles lazily:
            # set_stance("fail_on_recompile") would miss the latter.
            callback_handler.register_start_callback(self._on_compile)
        self.armed = True
        self._compiles.clear()
        self._allocations = self._device_allocations()

    def _device_allocations(self) -> int:
        if not self.cuda:
            return 0
        return torch.cuda.memory_stats_as_nested_dict(self.device)["num_device_alloc"]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch one step; raises SteadyError in strict mode, naming step and cause."""
        if not self.armed:
            yield
            return
        syncs: list[str] = []
        if self.cuda:
            with self._sync_mode(number), _sync_warnings(syncs):
                yield
        else:
            yield
        self._count(number, syncs)

    @contextmanager
    def _sync_mode(self, number: int) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error" if self.strict else "warn")
        try:
            yield
        except RuntimeError as error:
            if _SYNC_TEXT not in str(error):
                raise
            raise SteadyError(
                f"step {number} waited for the GPU after the warm-up: {error}"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _count(self, number: int, syncs: list[str]) -> None:
        allocations = self._device_allocations()
        grown, self._allocations = allocations - self._allocations, allocations
        compiles, self._compiles = self._compiles, []
        self.counts.steps += 1
        self.counts.recompiles += len(compiles)
        self.counts.device_allocations += grown
        self.counts.syncs += len(syncs)
        what = [f"recompile: {c} (TORCH_LOGS=recompiles names the guard)" for c in compiles]
        what += [f"{grown} device allocation(s): the working set grew"] if grown else []
        what += [f"host sync: {s}" for s in syncs]
        if what:
            self._violated(f"step {number} moved after the warm-up: {'; '.join(what)}")

    def _violated(self, sentence: str) -> None:
        self.first_violation = self.first_violation or sentence
        if self.strict:
            raise SteadyError(sentence)

    def add_others(self, total: Callable[[Sequence[int]], list[int]]) -> None:
        """Make the counts those of all ranks, at the end; `total` sums numbers over them."""
        c = self.counts
        c.recompiles, c.device_allocations, c.syncs = total(
            [c.recompiles, c.device_allocations, c.syncs]
        )

    def summary(self, world: int = 1) -> str:
        """The line that ends a run; `counts` are sums over `world` ranks then, but for `steps`."""
        return self._line() + (f", all {world} ranks together" if world > 1 else "")

    def _line(self) -> str:
        c = self.counts
        if not self.armed:
            return "the run ended within the warm-up: nothing was counted"
        if not self.cuda:
            return (
                f"after warm-up: {c.recompiles} recompiles in {c.steps} steps "
                "(allocations and syncs are counted on CUDA only)"
            )
        return (
            f"after warm-up: {c.recompiles} recompiles, {c.device_allocations} device allocations, "
            f"{c.syncs} syncs in {c.steps} steps"
        )


@contextmanager
def _sync_warnings(found: list[str]) -> Iterator[None]:
    """Collect torch's warnings of host syncs into `found`; pass all others on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=f".*{_SYNC_TEXT}")
        yield
    for warning in caught:
        if _SYNC_TEXT in str(warning.message):
            found.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
