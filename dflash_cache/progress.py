"""Progress of work that takes longer than a few seconds: done, rate, time left."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def format_seconds(seconds: float) -> str:
    """`75.2` -> `1:15`; hours are shown when there are any."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_bytes(count: float) -> str:
    """`12 bytes`, `1.5 KiB`, `4.6 GiB`, `38.2 TiB`."""
    power = 0
    while round(count, 1) >= 1024 and power < len(UNITS):
        count, power = count / 1024, power + 1
    return f"{count:.1f} {UNITS[power - 1]}" if power else f"{count:.0f} bytes"


class Progress:
    """Counts towards `total` units and writes a line now and then.

    On a terminal the line is rewritten a few times a second; in a log it is appended every ten
    seconds, so that a file of a week's run stays readable.
    """

    def __init__(self, total: int, label: str, unit: str, stream: TextIO):
        self.total, self.label, self.unit, self.stream = total, label, unit, stream
        self.done = 0
        self.started = time.monotonic()
        self.interactive = stream.isatty()
        self.interval = 0.2 if self.interactive else 10.0
        self.last = self.started

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def advance(self, n: int = 1) -> None:
        self.done += n
        if time.monotonic() - self.last >= self.interval:
            self.show()

    def line(self) -> str:
        rate = self.done / max(self.seconds, 1e-9)
        left = format_seconds((self.total - self.done) / rate) if self.done else "?"
        share = 100 * self.done / max(self.total, 1)
        return (
            f"{self.label}: {self.done:,}/{self.total:,} {self.unit} ({share:.0f} %), "
            f"{rate:,.0f} {self.unit}/s, {left} left"
        )

    def show(self) -> None:
        self.last = time.monotonic()
        if self.interactive:
            self.stream.write(f"\r\x1b[K{self.line()}")
        else:
            self.stream.write(self.line() + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self.interactive:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


@contextmanager
def progress(
    total: int, label: str, unit: str = "items", stream: TextIO | None = None
) -> Iterator[Progress]:
    """`with progress(n, "extract", "tokens") as bar: bar.advance(k)`; writes to stderr."""
    bar = Progress(total, label, unit, stream or sys.stderr)
    try:
        yield bar
    finally:
        bar.close()
