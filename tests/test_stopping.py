"""Signals: at once before there is anything to lose, afterwards when the job looks."""

import signal
import threading

import pytest

from dflash_cache import stopping
from dflash_cache.stopping import StopSignals, Terminated

BOTH = pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)


@BOTH
def test_before_the_job_a_signal_raises_at_once(number, error):
    with StopSignals(), pytest.raises(error):
        signal.raise_signal(number)


def test_sigterm_exits_with_143():
    assert Terminated.exit_code == 143


@BOTH
def test_in_the_job_a_signal_is_only_noted_and_its_echo_too(number, error):
    with StopSignals() as stop:
        stop.defer()
        assert stop.received is None
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.received == number


@BOTH
def test_a_later_second_signal_raises(number, error, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_MOMENT", 0.0)
    with StopSignals() as stop:
        stop.defer()
        signal.raise_signal(number)
        with pytest.raises(error):
            signal.raise_signal(number)


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_of_the_main_thread_nothing_is_handled():
    received = []

    def work() -> None:
        with StopSignals() as stop:
            received.append(stop.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [None]
