"""fn split once into three bf16, for calls with enough tokens to repay the launch."""

import triton
import triton.language as tl

from .pdl import after_previous
from .project import split3


@triton.jit
def pack_kernel(
    fn,  # [24, K] fp32
    packed,  # [72, K] bf16
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides K
    VENDOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """72 rows without padding, in an order that a sum over reshaped columns undoes:
    hi 0..15, mid 0..15, lo 0..15, then hi 16..23, mid 16..23, lo 16..23."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    after_previous(PDL)
    hi, mid, lo = split3(tl.load(fn + row * K + cols), VENDOR)
    first = tl.where(row < 16, row, 48 + row - 16)
    step = tl.where(row < 16, 16, 8)
    tl.store(packed + first * K + cols, hi)
    tl.store(packed + (first + step) * K + cols, mid)
    tl.store(packed + (first + 2 * step) * K + cols, lo)
