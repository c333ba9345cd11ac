"""The projection programs: W . R' of BLOCK_T tokens over COLS columns of every stream.

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )       unless it is given
    partial sums over the columns of W . R' (24 rows) and R'^2

`gates.py` adds the partial sums up. All offsets that grow with T are 64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, VENDOR: tl.constexpr, FENCE: tl.constexpr):
    """bf16(x), to nearest even.

    NVIDIA: two at a time; LLVM takes them one by one, at an eighth of the rate. FENCE: opaque to
    the compiler, so that the tile is computed once. Without it Triton recomputes the element-wise
    code in the layout that tl.dot wants, in every warp: 778 us against 515 for 16,316 tokens on an
    H200.
    """
    if VENDOR == "nvidia":
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=not FENCE,
            pack=2,
        )
    elif VENDOR == "amd" and FENCE:
        return tl.inline_asm_elementwise(
            "v_mov_b32 $0, $1",
            "=v,v",
            [x.to(tl.bfloat16)],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    else:
        return x.to(tl.bfloat16)


@triton.jit
def sum8(x):
    """x [A, B] summed over groups of 8 columns, [A, B / 8]: one thread's load, so no shuffles,
    and accumulators of an eighth of the registers."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), axis=2)


@triton.jit
def fma4(a0, a1, a2, a3, r0, r1, r2, r3, start):
    """start + a0 * r0 + a1 * r1 + a2 * r2 + a3 * r3, rounded in one way only: left to itself a
    compiler fuses either product of a * b + c * d, here the one and there the other."""
    return tl.fma(a3, r3, tl.fma(a2, r2, tl.fma(a1, r1, tl.fma(a0, r0, start))))


@triton.jit
def split3(w):
    """fp32 w as three bf16 whose sum is w exactly (3 x 8 bits of significand)."""
    hi = w.to(tl.bfloat16)
    rest = w - hi.to(tl.float32)
    mid = rest.to(tl.bfloat16)
    lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
    return hi, mid, lo


@triton.jit
def project(b, weight, acc, tail, stream: tl.constexpr, cols, H: tl.constexpr, K: tl.constexpr):
    """acc, tail += b . W_stream^T for b [BLOCK_T, BLOCK_H] bf16.

    weight is fn [24, K] fp32: acc [BLOCK_T, 32], tail unused. Or it is packed [72, K] bf16, see
    pack.py: acc [BLOCK_T, 64] takes rows 0..63, tail [BLOCK_T, 16] rows 64..71.
    """
    n = tl.arange(0, acc.shape[1])
    at = weight + n[:, None] * K + stream * H + cols[None, :]
    if weight.dtype.element_ty == tl.bfloat16:
        acc = tl.dot(b, tl.trans(tl.load(at)), acc)
        n = tl.arange(0, 16)
        at = weight + (64 + n[:, None]) * K + stream * H + cols[None, :]
        tail = tl.dot(b, tl.trans(tl.load(at, mask=n[:, None] < 8, other=0.0)), tail)
    else:
        hi, mid, lo = split3(tl.load(at, mask=n[:, None] < 24, other=0.0))
        acc = tl.dot(b, tl.trans(hi), acc)
        acc = tl.dot(b, tl.trans(mid), acc)
        acc = tl.dot(b, tl.trans(lo), acc)
    return acc, tail


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

    if POST:
        p0 = tl.load(post_layer_mix + row * 4 + 0, mask=live, other=0.0)[:, None]
        p1 = tl.load(post_layer_mix + row * 4 + 1, mask=live, other=0.0)[:, None]
        p2 = tl.load(post_layer_mix + row * 4 + 2, mask=live, other=0.0)[:, None]
        p3 = tl.load(post_layer_mix + row * 4 + 3, mask=live, other=0.0)[:, None]
        c00 = tl.load(comb_res_mix + row * 16 + 0, mask=live, other=0.0)[:, None]
        c01 = tl.load(comb_res_mix + row * 16 + 1, mask=live, other=0.0)[:, None]
        c02 = tl.load(comb_res_mix + row * 16 + 2, mask=live, other=0.0)[:, None]
        c03 = tl.load(comb_res_mix + row * 16 + 3, mask=live, other=0.0)[:, None]
        c10 = tl.load(comb_res_mix + row * 16 + 4, mask=live, other=0.0)[:, None]
        c11 = tl.load(comb_res_mix + row * 16 + 5, mask=live, other=0.0)[:, None]
        c12 = tl.load(comb_res_mix + row * 16 + 6, mask=live, other=0.0)[:, None]
        c13 = tl.load(comb_res_mix + row * 16 + 7, mask=live, other=0.0)[:, None]
        c20 = tl.load(comb_res_mix + row * 16 + 8, mask=live, other=0.0)[:, None]
        c21 = tl.load(comb_res_mix + row * 16 + 9, mask=live, other=0.0)[:, None]
        c22 = tl.load(comb_res_mix + row * 16 + 10, mask=live, other=0.0)[:, None]
        c23 = tl.load(comb_res_mix + row * 16 + 11, mask=live, other=0.0)[:, None]
        c30 = tl.load(comb_res_mix + row * 16 + 12, mask=live, other=0.0)[:, None]
        c31 = tl.load(comb_res_mix + row * 16 + 13, mask=live, other=0.0)[:, None]
        c32 = tl.load(comb_res_mix + row * 16 + 14, mask=live, other=0.0)[:, None]
        c33 = tl.load(comb_res_mix + row * 16 + 15, mask=live, other=0.0)[:, None]
    acc = tl.zeros([BLOCK_T, 64 if PACKED else 32], tl.float32)
    tail = tl.zeros([BLOCK_T, 16], tl.float32)
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
            x = x.to(tl.float32)
            r0 = b0.to(tl.float32)
            r1 = b1.to(tl.float32)
            r2 = b2.to(tl.float32)
            r3 = b3.to(tl.float32)
            b0 = fma4(c00, c10, c20, c30, r0, r1, r2, r3, p0 * x)
            b1 = fma4(c01, c11, c21, c31, r0, r1, r2, r3, p1 * x)
            b2 = fma4(c02, c12, c22, c32, r0, r1, r2, r3, p2 * x)
            b3 = fma4(c03, c13, c23, c33, r0, r1, r2, r3, p3 * x)
            b0 = rounded(b0, VENDOR, FENCE)
            b1 = rounded(b1, VENDOR, FENCE)
            b2 = rounded(b2, VENDOR, FENCE)
            b3 = rounded(b3, VENDOR, FENCE)
        if SQUARES:
            r0 = b0.to(tl.float32)
            if EXPAND:
                stream_sq += sum8(r0 * r0)
            else:
                r1 = b1.to(tl.float32)
                r2 = b2.to(tl.float32)
                r3 = b3.to(tl.float32)
                stream_sq += sum8(r0 * r0 + r1 * r1 + r2 * r2 + r3 * r3)
        # m += W . R', this step's columns summed apart: matrix units truncate every sum, and
        # one accumulator over all of K is off by 7e-5 of the projection, over a step by 1e-6.
        part = tl.zeros_like(acc)
        part_tail = tl.zeros_like(tail)
        part, part_tail = project(b0, weight, part, part_tail, 0, cols, H, K)
        if not EXPAND:
            part, part_tail = project(b1, weight, part, part_tail, 1, cols, H, K)
            part, part_tail = project(b2, weight, part, part_tail, 2, cols, H, K)
            part, part_tail = project(b3, weight, part, part_tail, 3, cols, H, K)
        acc += part
        tail += part_tail

    out = partials + (split.to(tl.int64) * T + first + row) * 32
    mask = live[:, None]
    if PACKED:  # undo the row order of pack.py
        acc = tl.reshape(acc, [BLOCK_T, 4, 16])
        group = tl.arange(0, 4)[None, :, None]
        head = tl.sum(tl.where(group < 3, acc, 0.0), axis=1)
        rest = tl.sum(tl.where(group == 3, acc, 0.0), axis=1)
        rest = tl.sum(tl.reshape(rest, [BLOCK_T, 2, 8]), axis=1)
        rest += tl.sum(tl.reshape(tail, [BLOCK_T, 2, 8]), axis=1)  # its last 8 columns are 0
        tl.store(out[:, None] + tl.arange(0, 16)[None, :], head, mask=mask)
        tl.store(out[:, None] + 16 + tl.arange(0, 8)[None, :], rest, mask=mask)
    else:
        k = tl.arange(0, 32)[None, :]
        tl.store(out[:, None] + k, acc, mask=mask & (k < 24))
    if SQUARES:
        tl.store(out + 24, tl.sum(stream_sq, axis=1), mask=live)
