"""fn split once into three bf16, for calls with enough tokens to repay the work."""

import triton
import triton.language as tl

from .pdl import after_previous
from .project import split3


@triton.jit
def pack_program(
    fn,  # [24, K] fp32
    packed,  # [72, K] bf16
    program,  # of 24 * K / BLOCK_K
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides K
    VENDOR: tl.constexpr,
):
    """72 rows without padding, in an order that a sum over reshaped columns undoes:
    hi 0..15, mid 0..15, lo 0..15, then hi 16..23, mid 16..23, lo 16..23."""
    row = program % 24
    cols = program // 24 * BLOCK_K + tl.arange(0, BLOCK_K)
    hi, mid, lo = split3(tl.load(fn + row * K + cols), VENDOR)
    first = tl.where(row < 16, row, 48 + row - 16)
    step = tl.where(row < 16, 16, 8)
    tl.store(packed + first * K + cols, hi)
    tl.store(packed + (first + step) * K + cols, mid)
    tl.store(packed + (first + 2 * step) * K + cols, lo)


@triton.jit
def pack_kernel(
    fn,  # [24, K] fp32
    packed,  # [72, K] bf16
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VENDOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where no row programs run before the projection."""
    after_previous(PDL)
    pack_program(fn, packed, tl.program_id(0), K, BLOCK_K, VENDOR)
