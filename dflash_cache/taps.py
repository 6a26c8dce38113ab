"""Which decoder layers' outputs are taken."""

from collections.abc import Sequence

from dflash_cache.errors import UsageError

DEFAULT_TAPS = 5


def default_taps(layers: int, n: int = DEFAULT_TAPS) -> tuple[int, ...]:
    """z-lab's choice: `round(1 + i (N-4) / (n-1))`, N//2 for one tap; spread evenly if N is small.

    A tap is the 0-based id of a decoder layer whose output is taken.
    """
    if not 1 <= n <= layers:
        raise UsageError(f"{n} taps do not fit a target of {layers} layers; choose 1..{layers}")
    if n == 1:
        return (layers // 2,)
    taps = tuple(round(1 + i * (layers - 4) / (n - 1)) for i in range(n))
    if taps[0] < taps[-1] and len(set(taps)) == n:
        return taps
    return tuple(i * (layers - 1) // (n - 1) for i in range(n))


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """`"1,8,15"` -> (1, 8, 15); None, "" and "auto" -> None, the default taps."""
    if text is None or text.strip() in ("", "auto"):
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"taps {text!r} are not whole numbers separated by commas") from None
    return taps


def check_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """`UsageError` unless the taps are increasing layer ids of a target of `layers` layers."""
    wrong = [t for t in taps if not 0 <= t < layers]
    if wrong:
        raise UsageError(
            f"tap {wrong[0]} does not exist: the target has {layers} layers, so taps lie in "
            f"0..{layers - 1}"
        )
    if not taps or list(taps) != sorted(set(taps)):
        raise UsageError(f"taps {list(taps)} must be given in increasing order, each one once")
    return tuple(int(t) for t in taps)
