"""Which tokens of a stored row may have states that no model has: a fast look before decoding.

Decoding eight bits on a CPU takes ten times as long as reading them from a disk. Nearly all tokens
can be cleared without: a few integer maxima, and sixteen channels.
"""

import numpy as np
import torch
from torch import Tensor

from dflash_cache.encoding import decode

# The bits of bf16 infinity; what lies above it is NaN.
INFINITE = 0x7F80
# Two of these channels decode to different numbers in nearly every vector, which is not flat then.
PROBE = 16
# Scales below give finite bf16 numbers, whatever the codes: 448 times as much is below 3e38.
LARGEST = 1e35
FP8_NAN = 0x7F


def suspects(
    stored: np.ndarray, encoding: str, scales: np.ndarray | None, channels: Tensor | None
) -> np.ndarray:
    """bool [S]: tokens with a tap that may not be finite, or be the same number everywhere.

    stored [S, T, D], scales [S, T], channels [T, D] as `encoding.decode` takes them. A token that
    is wrong is always among them; one among them may be right.
    """
    if scales is None:
        return np.asarray(suspect_bits(stored).any(-1))
    part = None if channels is None else channels[:, :PROBE]
    first = torch.from_numpy(np.ascontiguousarray(stored[..., :PROBE]))
    probe = decode(first, encoding, torch.from_numpy(scales), part)  # [S, T, PROBE]
    strange = suspect_bits(probe.view(torch.uint16).numpy())
    reach = scales if channels is None else scales * float(channels.max())
    strange |= ~(reach < LARGEST)  # true of NaN
    if encoding == "fp8":
        strange |= (stored & FP8_NAN).max(-1) == FP8_NAN
    return np.asarray(strange.any(-1))


def suspect_bits(bits: np.ndarray) -> np.ndarray:
    """bf16 bits, uint16 [.., T, D] -> bool [.., T]: a vector not finite, or everywhere the same.

    Also true of a vector of zeros of either sign. Three maxima over integers: eight times as fast
    as comparing floats.
    """
    signed, unsigned = bits.view(np.int16), bits.view(np.uint16)
    largest, least, raw = signed.max(-1), signed.min(-1), unsigned.max(-1)
    positive, negative = largest >= INFINITE, raw >= INFINITE + 0x8000  # not finite
    zero = (largest <= 0) & (raw <= 0x8000)
    return np.asarray(positive | negative | zero | (largest == least))
