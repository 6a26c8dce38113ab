"""SIGTERM and Ctrl-C: at once while nothing is being written, else when the row is done."""

import signal
import threading
import time
from types import FrameType
from typing import Any

# torchrun passes on a Ctrl-C that its workers have had from the terminal: it is not a second one.
SAME_MOMENT = 2.0


class Terminated(KeyboardInterrupt):
    """SIGTERM; unwinds like Ctrl-C, so that nothing half-made stays behind."""

    exit_code = 128 + signal.SIGTERM


class StopSignals:
    """While entered, SIGTERM raises `Terminated`; after `defer()` both signals set `received`.

    A second signal, later than `SAME_MOMENT`, raises at once all the same. Does nothing outside of
    the main thread, where Python cannot handle signals.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on the caller looks at `received` itself."""
        self._deferred = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and now - self._at < SAME_MOMENT:
            return
        again, self.received, self._at = self.received is not None, number, now
        if again or not self._deferred:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
