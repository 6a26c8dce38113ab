"""Broken states are found, too many of them stop the job; the writer thread keeps its order."""

import numpy as np
import pytest

from dflash_cache.errors import DataError
from dflash_cache.health import FIRST, LATER, Guard, what_is_wrong
from dflash_cache.rowpipe import WriterThread


@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "non-finite"), (float("inf"), "non-finite")]
)
def test_non_finite_states_are_found(value, reason):
    least, largest = -np.ones((4, 2)), np.ones((4, 2))
    assert what_is_wrong(least, largest) is None
    largest[2, 1] = value
    assert reason in str(what_is_wrong(least, largest))


def test_zero_and_constant_states_are_found():
    least, largest = -np.ones((4, 2)), np.ones((4, 2))
    least[1, 0] = largest[1, 0] = 0
    assert what_is_wrong(least, largest) == "all-zero states"
    least[3, 1] = largest[3, 1] = 2
    assert what_is_wrong(least, largest) == "constant states"


BAD = {"line": 1, "reason": "all-zero states"}


def test_one_in_ten_of_the_first_hundred_documents_stops_the_job():
    guard = Guard()
    for _ in range(9):
        guard.add([BAD], 1)
    guard.add([], FIRST - 10)
    with pytest.raises(DataError, match=r"10 of 100 .*line 1"):
        guard.add([BAD], 1)


def test_later_one_in_a_thousand_stops_the_job():
    guard = Guard()
    guard.add([BAD], 500)
    guard.add([], LATER - 501)
    guard.check_shard()
    with pytest.raises(DataError, match="2 of 1000"):
        guard.add([BAD], 1)


def test_a_writer_thread_runs_jobs_in_order_with_a_bounded_queue():
    done: list[int] = []
    thread = WriterThread(depth=2)
    for i in range(20):
        thread.submit(done.append, i)
        assert len(done) >= i - 2
    thread.drain()
    thread.close()
    assert done == list(range(20))
