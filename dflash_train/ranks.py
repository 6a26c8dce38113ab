"""The processes of one run under torchrun, one a GPU: what they add up, agree on, and tell.

Gradients are summed once a step, after the last forward, not by DistributedDataParallel: our loss
is a sum, divided by the global weight in the update, so its averaging would have to be undone; its
hooks see a compiled backward as one node, so they would overlap nothing; and it needs `no_sync` for
accumulation. What is small travels in one flat tensor, what is large in place, without a copy.

Host and device never wait for each other here: tensors of the CPU go through gloo, those of a GPU
through NCCL on the current stream. The hosts meet once a step (`largest`), which keeps signals and
lost ranks from hanging a run.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from dflash_cache.errors import DataError, UsageError
from dflash_train.steady import SteadyError

PATIENCE = timedelta(hours=2)  # the others wait so long while rank 0 evaluates or saves
SMALL = 1 << 20  # numbers; smaller tensors are summed together

# What a rank keeps to itself if another one has told its reason; any other error is a bug.
_TOLD_ONCE = (DataError, UsageError, SteadyError, KeyboardInterrupt)


class PeerLost(DataError):
    """Another rank ended, or did not answer within `PATIENCE`."""


class Ranks:
    """This process among those of the run; alone (rank 0 of 1) unless `join` found others.

    As a context manager it ends them together: after an error the first rank to have one raises it,
    and the others, which only lost their peer or met the same error, exit without a word.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: dist.Store | None = None,
        *,
        nccl: bool = False,
    ):
        self.rank, self.world, self._store, self._nccl = rank, world, store, nccl

    @classmethod
    def join(cls, device: torch.device, named: str) -> "Ranks":
        """Meet the other processes that torchrun started, if any; `named` is the device asked for.

        UsageError for a device that several ranks would share, and for WORLD_SIZE without the rest
        of what torchrun sets.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UsageError(
                    f"WORLD_SIZE is {world}, but {name} is not set: start the ranks with torchrun"
                )
        if device.type == "cuda" and ":" in named:
            raise UsageError(f"device {named} cannot serve {world} ranks: give cuda, one GPU each")
        nccl = device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        store, rank, world = next(dist.rendezvous("env://", timeout=PATIENCE))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
        return cls(rank, world, dist.PrefixStore("dflash", store), nccl=nccl)

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.world == 1:
            return
        if error is None:
            self.largest(0)  # rank 0 may still be writing
            dist.destroy_process_group()
        elif isinstance(error, _TOLD_ONCE) and self._told():
            raise SystemExit(getattr(error, "exit_code", 1)) from error

    def _told(self) -> bool:
        """Whether another rank has an error to tell already; else this one has from now on."""
        try:
            return self._store is not None and self._store.add("errors", 1) > 1
        except (RuntimeError, dist.DistError):  # it was kept by a rank that is gone
            return False

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            if self._nccl:  # a sum that waits for the lost rank would hold the loader's copies back
                _abort_process_group()
            raise PeerLost(
                f"rank {self.rank} lost another rank, which ended or did not answer for "
                f"{PATIENCE} ({str(error).splitlines()[0]}): the same command with --resume goes "
                "on from the last checkpoint"
            ) from error

    def share(self, forwards: int) -> int:
        """How many of a step's forwards are this rank's; UsageError if they do not divide."""
        if forwards % self.world:
            raise UsageError(
                f"accumulation is {forwards}, but it counts the forwards of a step over all ranks, "
                f"here {self.world}: give a multiple of {self.world}"
            )
        return forwards // self.world

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks; those of fewer than SMALL numbers must
        have one dtype and device."""
        if self.world == 1:
            return
        small = [t for t in tensors if t.numel() < SMALL]
        with self._talking(), torch.no_grad():
            for tensor in tensors:
                if tensor.numel() >= SMALL:
                    dist.all_reduce(tensor)
            if small:
                flat = torch.cat([t.reshape(-1) for t in small])
                dist.all_reduce(flat)
                parts = flat.split([t.numel() for t in small])
                for tensor, part in zip(small, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        if self.world == 1:
            return
        with self._talking(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers; the hosts wait for each other here, no device does."""
        return self._reduced([number], dist.ReduceOp.MAX)[0]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """The sums of the ranks' numbers."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def _reduced(self, numbers: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        with self._talking():
            dist.all_reduce(values, how)
        return values.tolist()

    def all_of(self, values: Tensor) -> list[int]:
        """The integers of all ranks, rank by rank; waits for the device."""
        values = values.cpu().contiguous()
        if self.world == 1:
            return values.flatten().tolist()
        parts = [torch.empty_like(values) for _ in range(self.world)]
        with self._talking():
            dist.all_gather(parts, values)
        return torch.cat([part.flatten() for part in parts]).tolist()

    def check_same(self, what: str, digest: str) -> None:
        """DataError unless all ranks see the same hexadecimal digest."""
        number = int(digest[:15], 16)  # 60 bits
        if self.largest(number) != -self.largest(-number):
            raise DataError(
                f"the ranks see different {what}: wait until nothing writes there any more, and "
                "run the same command again"
            )
