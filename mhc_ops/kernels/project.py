"""The projection programs: W . R' of BLOCK_T tokens over COLS columns of every stream.

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )       unless it is given
    partial sums over the columns of W . R' (24 rows) and R'^2

`gates.py` adds the partial sums up. All offsets that grow with T are 64-bit.
"""

import triton
import triton.language as tl

from .pdl import after_previous, prefetch
from .post import load_gates, load_streams, mix, rounded, square


@triton.jit
def sum8(x):
    """x [A, B] summed over groups of 8 columns, [A, B / 8]: one thread's load, so no shuffles,
    and accumulators of an eighth of the registers."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), axis=2)


@triton.jit
def split3(w, VENDOR: tl.constexpr):
    """fp32 w as three bf16 whose sum is w exactly (3 x 8 bits of significand)."""
    hi = rounded(w, VENDOR, False)
    rest = w - hi.to(tl.float32)
    mid = rounded(rest, VENDOR, False)
    lo = rounded(rest - mid.to(tl.float32), VENDOR, False)
    return hi, mid, lo


@triton.jit
def nothing(tokens: tl.constexpr, PACKED: tl.constexpr):
    """What `project` adds to, before anything was."""
    if PACKED:
        return tl.zeros([tokens, 64], tl.float32), tl.zeros([tokens, 16], tl.float32)
    else:
        return tl.zeros([tokens, 32], tl.float32), tl.zeros([tokens, 32], tl.float32)


@triton.jit
def project(b, weight, acc, tail, k, K: tl.constexpr, VENDOR: tl.constexpr):
    """acc, tail + b . W^T for b [tokens, columns] bf16, whose columns are k of the K.

    weight is fn [24, K] fp32: acc, tail [tokens, 32] are what its leading eight bits give and what
    the rest gives, two chains of dots that need not wait for each other. Or it is packed [72, K]
    bf16, see pack.py: acc [tokens, 64] of rows 0..63, tail [tokens, 16] of rows 64..71.
    """
    n = tl.arange(0, acc.shape[1])[:, None]
    if weight.dtype.element_ty == tl.bfloat16:
        acc = tl.dot(b, tl.trans(tl.load(weight + n * K + k[None, :])), acc)
        n = tl.arange(0, 16)[:, None]
        w = tl.load(weight + (64 + n) * K + k[None, :], mask=n < 8, other=0.0)
        tail = tl.dot(b, tl.trans(w), tail)
    else:
        w = tl.load(weight + n * K + k[None, :], mask=n < 24, other=0.0)
        hi, mid, lo = split3(w, VENDOR)
        acc = tl.dot(b, tl.trans(hi), acc)
        tail = tl.dot(b, tl.trans(mid), tail)
        tail = tl.dot(b, tl.trans(lo), tail)
    return acc, tail


@triton.jit
def add(acc, tail, part, part_tail):
    """acc + part, tail + part_tail, of a step's columns: matrix units truncate every sum, and one
    accumulator over all of K is off by 7e-5 of the projection, over 256 of it by 1e-6. As fma:
    Triton makes an addition to a dot an accumulator of the dot."""
    return tl.fma(part, 1.0, acc), tl.fma(part_tail, 1.0, tail)


@triton.jit
def store_partials(partials, split, t, live, T, acc, tail, PACKED: tl.constexpr):
    """The 24 projections of tokens t that `project` left in acc and tail."""
    out = partials + (split.to(tl.int64) * T + t) * 32
    mask = live[:, None]
    if PACKED:  # undo the row order of pack.py
        acc = tl.reshape(acc, [t.shape[0], 4, 16])
        group = tl.arange(0, 4)[None, :, None]
        head = tl.sum(tl.where(group < 3, acc, 0.0), axis=1)
        rest = tl.sum(tl.where(group == 3, acc, 0.0), axis=1)
        rest = tl.sum(tl.reshape(rest, [t.shape[0], 2, 8]), axis=1)
        rest += tl.sum(tl.reshape(tail, [t.shape[0], 2, 8]), axis=1)  # its last 8 columns are 0
        tl.store(out[:, None] + tl.arange(0, 16)[None, :], head, mask=mask)
        tl.store(out[:, None] + 16 + tl.arange(0, 8)[None, :], rest, mask=mask)
    else:
        k = tl.arange(0, 32)[None, :]
        tl.store(out[:, None] + k, acc + tail, mask=mask & (k < 24))


@triton.jit
def prefetch_weights(weight, split, H: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    """The COLS columns of every row and stream of fn: lines of 32 columns."""
    LINES: tl.constexpr = COLS // 32
    line = tl.arange(0, 128)
    for first in tl.static_range(0, 24 * (K // H), 128 // LINES):
        k = tl.minimum(first + line // LINES, 24 * (K // H) - 1)
        prefetch(weight + k * H + tl.minimum(split * COLS + line % LINES * 32, H - 1))


@triton.jit
def project_program(
    residual,  # [T, 4, H] bf16, or None: every R'_j is sublayer_out, the model's entry
    sublayer_out,  # [T, H] bf16, or None: residual already is R'
    post_layer_mix,  # [T, 4] fp32, or None without post
    comb_res_mix,  # [T, 4, 4] fp32, or None without post
    weight,  # [24, K] fp32 or [72, K] bf16, see project
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2, 7 unused
    tile,  # which BLOCK_T tokens
    split,  # which COLS columns
    T,
    H: tl.constexpr,
    K: tl.constexpr,  # 4 * H, or H without residual
    COLS: tl.constexpr,  # columns a program: a multiple of BLOCK_H
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # divides H
    SQUARES: tl.constexpr,  # sum R'^2 here; otherwise row programs do
    VENDOR: tl.constexpr,
    FENCE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # 64-bit offset of the tile, 32-bit offsets inside it: half the address registers.
    first = tile.to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = first + row < T
    EXPAND: tl.constexpr = residual is None
    POST: tl.constexpr = post_layer_mix is not None
    PACKED: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    if residual is not None:
        residual += first * (4 * H)
    if sublayer_out is not None:
        sublayer_out += first * H
    if POST:
        post_layer_mix += first * 4
        comb_res_mix += first * 16

    if PDL and not PACKED:
        prefetch_weights(weight, split, H, K, COLS)
    after_previous(PDL)
    if POST:
        p = load_gates(post_layer_mix, row, live, 4)
        c = load_gates(comb_res_mix, row, live, 16)
    zeros, zeros_tail = nothing(BLOCK_T, PACKED)
    acc, tail = zeros, zeros_tail
    stream_sq = tl.zeros([BLOCK_T, BLOCK_H // 8], tl.float32)
    begin = split * COLS
    if H % COLS == 0:
        end = begin + COLS
    else:
        end = tl.minimum(begin + COLS, H)
    for h in tl.range(begin, end, BLOCK_H, num_stages=STAGES):
        cols = h + tl.arange(0, BLOCK_H)
        at = row[:, None] * (4 * H) + cols[None, :]
        mask = live[:, None]
        if EXPAND:
            b0 = tl.load(sublayer_out + row[:, None] * H + cols[None, :], mask=mask, other=0.0)
            b1 = b0
            b2 = b0
            b3 = b0
        else:
            b0 = tl.load(residual + at, mask=mask, other=0.0)
            b1 = tl.load(residual + at + H, mask=mask, other=0.0)
            b2 = tl.load(residual + at + 2 * H, mask=mask, other=0.0)
            b3 = tl.load(residual + at + 3 * H, mask=mask, other=0.0)
        if POST:
            # R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
            x = tl.load(sublayer_out + row[:, None] * H + cols[None, :], mask=mask, other=0.0)
            b0, b1, b2, b3 = mix(p, c, x, b0, b1, b2, b3, VENDOR, FENCE)
        if SQUARES:
            stream_sq += sum8(square(b0, b1, b2, b3, EXPAND))
        # m += W . R'
        part, part_tail = project(b0, weight, zeros, zeros_tail, cols, K, VENDOR)
        if not EXPAND:
            part, part_tail = project(b1, weight, part, part_tail, H + cols, K, VENDOR)
            part, part_tail = project(b2, weight, part, part_tail, 2 * H + cols, K, VENDOR)
            part, part_tail = project(b3, weight, part, part_tail, 3 * H + cols, K, VENDOR)
        acc, tail = add(acc, tail, part, part_tail)

    store_partials(partials, split, first + row, live, T, acc, tail, PACKED)
    if SQUARES:
        out = partials + (split.to(tl.int64) * T + first + row) * 32
        tl.store(out + 24, tl.sum(stream_sq, axis=1), mask=live)


@triton.jit
def weights_of(weight, stream: tl.constexpr, cols, H: tl.constexpr, K: tl.constexpr):
    """[32, columns] fp32: fn's 24 rows of a stream's columns, then zeros."""
    n = tl.arange(0, 32)[:, None]
    at = weight + n * K + stream * H + cols[None, :]
    return tl.load(at, mask=(n < 24) & (cols < H)[None, :], other=0.0)


@triton.jit
def project_few_program(
    residual,  # [T, 4, H] bf16, or None: every R'_j is sublayer_out, the model's entry
    sublayer_out,  # [T, H] bf16, or None: residual already is R'
    post_layer_mix,  # [T, 4] fp32, or None without post
    comb_res_mix,  # [T, 4, 4] fp32, or None without post
    weight,  # [24, K] fp32
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2, 7 unused
    tile,  # which BLOCK_T tokens
    split,  # which COLS columns
    T,
    H: tl.constexpr,
    K: tl.constexpr,  # 4 * H, or H without residual
    COLS: tl.constexpr,  # columns a program
    BLOCK_T: tl.constexpr,
    VENDOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """project_program for a handful of tokens: in fp32, without tl.dot, whose 16 rows would be
    mostly empty and whose weights would have to be split first. T = 1 on an H200: 6.0 us a seam,
    with tl.dot 9.6."""
    if PDL:
        prefetch_weights(weight, split, H, K, COLS)
    after_previous(PDL)
    EXPAND: tl.constexpr = residual is None
    POST: tl.constexpr = post_layer_mix is not None
    cols = split * COLS + tl.arange(0, COLS)
    mask = cols < H
    w0 = weights_of(weight, 0, cols, H, K)
    if not EXPAND:
        w1 = weights_of(weight, 1, cols, H, K)
        w2 = weights_of(weight, 2, cols, H, K)
        w3 = weights_of(weight, 3, cols, H, K)
    sums = ()
    for i in tl.static_range(BLOCK_T):
        # The last tile's surplus is the last token again.
        t = tl.minimum(tile * BLOCK_T + i, T - 1).to(tl.int64)
        b0, b1, b2, b3 = load_streams(residual, sublayer_out, t, cols, mask, H)
        if POST:
            # R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
            p = load_gates(post_layer_mix, t, None, 4)
            c = load_gates(comb_res_mix, t, None, 16)
            x = tl.load(sublayer_out + t * H + cols, mask=mask, other=0.0)
            b0, b1, b2, b3 = mix(p, c, x, b0, b1, b2, b3, VENDOR, False)
        # m += W . R'
        m = w0 * b0.to(tl.float32)[None, :]
        if not EXPAND:
            m = tl.fma(w1, tl.broadcast_to(b1.to(tl.float32)[None, :], w1.shape), m)
            m = tl.fma(w2, tl.broadcast_to(b2.to(tl.float32)[None, :], w2.shape), m)
            m = tl.fma(w3, tl.broadcast_to(b3.to(tl.float32)[None, :], w3.shape), m)
        squares = tl.sum(square(b0, b1, b2, b3, EXPAND), axis=0)
        sums += (tl.where(tl.arange(0, 32) == 24, squares, tl.sum(m, axis=1)),)
    for i in tl.static_range(BLOCK_T):
        t = tl.minimum(tile * BLOCK_T + i, T - 1).to(tl.int64)
        tl.store(partials + (split.to(tl.int64) * T + t) * 32 + tl.arange(0, 32), sums[i])
