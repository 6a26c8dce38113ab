"""Best-fit-decreasing bin packing, within a window of documents."""

from bisect import bisect_left, insort

import numpy as np

# A row with less free space than this share of S is closed at the end of a window.
CLOSED_SHARE = 1 / 64


def pack(
    lengths: np.ndarray, seq_len: int, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Place documents of `lengths` [N] (each <= seq_len) into rows of `seq_len` places.

    Returns int32 arrays [N]: the row, the start within it, the number within it (from 1), and the
    number of rows. In each window of documents the longest come first, each goes into the fullest
    row that still has room (the oldest of equals). Rows with room stay open for later windows.
    """
    row, start, number = (np.zeros(len(lengths), dtype=np.int32) for _ in range(3))
    used: list[int] = []
    count: list[int] = []
    open_rows: list[tuple[int, int]] = []  # (free places, row), ascending
    for first in range(0, len(lengths), window):
        part = lengths[first : first + window]
        for index in first + np.argsort(-part.astype(np.int64), kind="stable"):
            length = int(lengths[index])
            at = bisect_left(open_rows, (length, -1))
            if at == len(open_rows):
                free, chosen = seq_len, len(used)
                used.append(0)
                count.append(0)
            else:
                free, chosen = open_rows.pop(at)
            row[index], start[index] = chosen, used[chosen]
            used[chosen] += length
            count[chosen] += 1
            number[index] = count[chosen]
            if free > length:
                insort(open_rows, (free - length, chosen))
        open_rows = [item for item in open_rows if item[0] >= seq_len * CLOSED_SHARE]
    return row, start, number, len(used)
