"""m = W . R' as a plain matrix product, when rows of R' are in memory already."""

import triton
import triton.language as tl

from .pdl import after_previous
from .project import add, nothing, project, store_partials, sum8


@triton.jit(do_not_specialize=["T"])
def gemm_kernel(
    streams,  # [T, K] bf16
    weight,  # [24, K] fp32 or [72, K] bf16, see project.py
    partials,  # [splits, T, 32] fp32: 24 projections, with SQUARES sum R'^2
    T,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    COLS: tl.constexpr,  # of the K, a program: a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VENDOR: tl.constexpr,
    SQUARES: tl.constexpr,  # sum R'^2 here; otherwise row programs made it
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    PACKED: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    split = tl.program_id(0) % SPLITS
    first = (tl.program_id(0) // SPLITS).to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = first + row < T
    streams += first * K
    zeros, zeros_tail = nothing(BLOCK_T, PACKED)
    acc, tail = zeros, zeros_tail
    squares = tl.zeros([BLOCK_T, BLOCK_K // 8], tl.float32)
    begin = split * COLS
    if K % COLS == 0:
        end = begin + COLS
    else:
        end = tl.minimum(begin + COLS, K)
    for first_k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = first_k + tl.arange(0, BLOCK_K)
        b = tl.load(streams + row[:, None] * K + k[None, :], mask=live[:, None], other=0.0)
        if SQUARES:
            squares += sum8(b.to(tl.float32) * b.to(tl.float32))
        # m += W . R'
        part, part_tail = project(b, weight, zeros, zeros_tail, k, K, VENDOR)
        acc, tail = add(acc, tail, part, part_tail)
    store_partials(partials, split, first + row, live, T, acc, tail, PACKED)
    if SQUARES:
        out = partials + (split.to(tl.int64) * T + first + row) * 32
        tl.store(out + 24, tl.sum(squares, axis=1), mask=live)
