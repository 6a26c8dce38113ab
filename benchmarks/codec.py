"""int8 and fp8 on a GPU: bandwidth of encoding and decoding against a copy of as many bytes.

python benchmarks/codec.py [--rows 4] [--seq-len 4096] [--taps 5] [--hidden 2560]
"""

from collections.abc import Callable

import click
import torch
from torch import Tensor

from dflash_cache.encoding import Codec

SETS = 4  # inputs in turn, so that no cache holds the next one


def milliseconds(work: Callable[[int], object], repeats: int = 40) -> float:
    """Median of device times; `work(i)` uses the i-th input."""
    for i in range(SETS):
        work(i)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (start, end) in enumerate(pairs):
        start.record()
        work(i % SETS)
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2]


def copy_rate(nbytes: int) -> float:
    """GB/s read and written by a device-to-device copy that moves `nbytes` in all."""
    half = (nbytes // 2,)
    sources = [torch.randint(255, half, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
    target = torch.empty_like(sources[0])
    return nbytes / milliseconds(lambda i: target.copy_(sources[i])) / 1e6


@click.command()
@click.option("--rows", default=4, show_default=True)
@click.option("--seq-len", default=4096, show_default=True)
@click.option("--taps", default=5, show_default=True)
@click.option("--hidden", default=2560, show_default=True)
def main(rows: int, seq_len: int, taps: int, hidden: int) -> None:
    """Print GB/s and their share of the copy's."""
    shape = (rows, seq_len, taps, hidden)
    states = [torch.randn(shape, device="cuda").bfloat16() for _ in range(SETS)]
    channels = torch.rand(taps, hidden, device="cuda") + 0.5
    moved = states[0].numel() * 3  # two bytes on one side, one on the other; scales are nothing
    copied = copy_rate(moved)
    print(f"copy of {moved / 1e9:.2f} GB: {copied:,.0f} GB/s")
    for name in ("int8", "fp8"):
        codec = Codec(name, channels, "cuda")
        encoded = [codec.encode(x) for x in states]
        results: dict[str, Callable[[int], Tensor]] = {
            "encode": lambda i, codec=codec: codec.encode(states[i]).states,
            "decode": lambda i, codec=codec, encoded=encoded: codec.decode(*encoded[i]),
        }
        for direction, work in results.items():
            rate = moved / milliseconds(work) / 1e6
            print(f"{name} {direction}: {rate:,.0f} GB/s, {rate / copied:.1%} of the copy")


if __name__ == "__main__":
    main()
