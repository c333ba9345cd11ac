"""fn split once into bf16 hi and lo, for calls with enough tokens to repay it."""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    fn,  # [24, K] fp32
    packed,  # [64, K] bf16: rows 0..23 hi, 32..55 lo, the others never read
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(fn + row * K + cols)
    hi = w.to(tl.bfloat16)
    tl.store(packed + row * K + cols, hi)
    tl.store(packed + (32 + row) * K + cols, (w - hi.to(tl.float32)).to(tl.bfloat16))
