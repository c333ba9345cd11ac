"""The first launch of a seam: everything that needs the streams.

A program owns BLOCK_T tokens and COLS columns of every stream and walks them BLOCK_H at a time:

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )       stored
    u    = bf16( sum_j q_j * R'_j )                    stored, not yet normalised
    aux  = bf16( sum_j R'_j / 4 )                      stored
    partial sums over its columns of W . R' (24 rows), R'^2 and u^2

`finish.py` adds the partial sums and does the rest. All offsets that grow with T are 64-bit.

Which of these an operator wants follows from the pointers that are not None. Operators must agree
to the last bit on what they share, although they are compiled apart: so the sums whose products
round are written as fma, and every operator runs the same tiles (the order of sum(u^2)).
"""

import triton
import triton.language as tl


@triton.jit
def keep_layout(x, FENCE: tl.constexpr):
    """x, opaque to the compiler: the bf16 tile [BLOCK_T, BLOCK_H] is computed once.

    Without it Triton recomputes the element-wise code in the layout that tl.dot wants, in every
    warp: 778 us against 515 for 16,316 tokens on an H200. FENCE "": no fence.
    """
    if FENCE == "nvidia":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    elif FENCE == "amd":
        return tl.inline_asm_elementwise(
            "v_mov_b32 $0, $1", "=v,v", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    else:
        return x


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


@triton.jit(
    do_not_specialize=["T"],
    do_not_specialize_on_alignment=["post_layer_mix", "comb_res_mix", "pre_mix"],
)
def seam_kernel(
    residual,  # [T, 4, H] bf16, or None: every R'_j is sublayer_out, the model's entry
    sublayer_out,  # [T, H] bf16, or None: residual already is R'
    post_layer_mix,  # [T, 4] fp32, or None without post
    comb_res_mix,  # [T, 4, 4] fp32, or None without post
    pre_mix,  # [T, 4] fp32, or None: u is stream 0
    weight,  # [24, K] fp32 or [72, K] bf16, see project; or None: no gates
    residual_out,  # [T, 4, H] bf16, may be residual; or None without sublayer_out
    collapsed,  # [T, H] bf16: u; or None: no collapse
    aux,  # [T, H] bf16, or None
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2, sum u^2, 6 unused; or None
    # without weight and collapsed
    T,
    H: tl.constexpr,
    K: tl.constexpr,  # 4 * H, or H without residual
    COLS: tl.constexpr,  # columns a program: a multiple of BLOCK_H
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # divides H
    FENCE: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # 64-bit offset of the tile, 32-bit offsets inside it: half the address registers.
    first = tile.to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = first + row < T
    EXPAND: tl.constexpr = residual is None
    POST: tl.constexpr = post_layer_mix is not None
    PACKED: tl.constexpr = weight is not None and weight.dtype.element_ty == tl.bfloat16
    if residual is not None:
        residual += first * (4 * H)
    if residual_out is not None:
        residual_out += first * (4 * H)
    if collapsed is not None:
        collapsed += first * H
    if aux is not None:
        aux += first * H
    if sublayer_out is not None:
        sublayer_out += first * H
    if POST:
        post_layer_mix += first * 4
        comb_res_mix += first * 16
    if pre_mix is not None:
        pre_mix += first * 4

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
    if pre_mix is not None:
        q0 = tl.load(pre_mix + row * 4 + 0, mask=live, other=0.0)[:, None]
        q1 = tl.load(pre_mix + row * 4 + 1, mask=live, other=0.0)[:, None]
        q2 = tl.load(pre_mix + row * 4 + 2, mask=live, other=0.0)[:, None]
        q3 = tl.load(pre_mix + row * 4 + 3, mask=live, other=0.0)[:, None]

    acc = tl.zeros([BLOCK_T, 64 if PACKED else 32], tl.float32)
    tail = tl.zeros([BLOCK_T, 16], tl.float32)
    stream_sq = tl.zeros([BLOCK_T, BLOCK_H // 8], tl.float32)
    collapse_sq = tl.zeros([BLOCK_T, BLOCK_H // 8], tl.float32)
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
            b0 = fma4(c00, c10, c20, c30, r0, r1, r2, r3, p0 * x).to(tl.bfloat16)
            b1 = fma4(c01, c11, c21, c31, r0, r1, r2, r3, p1 * x).to(tl.bfloat16)
            b2 = fma4(c02, c12, c22, c32, r0, r1, r2, r3, p2 * x).to(tl.bfloat16)
            b3 = fma4(c03, c13, c23, c33, r0, r1, r2, r3, p3 * x).to(tl.bfloat16)
            b0 = keep_layout(b0, FENCE)
            b1 = keep_layout(b1, FENCE)
            b2 = keep_layout(b2, FENCE)
            b3 = keep_layout(b3, FENCE)
        if residual_out is not None:
            tl.store(residual_out + at, b0, mask=mask)
            tl.store(residual_out + at + H, b1, mask=mask)
            tl.store(residual_out + at + 2 * H, b2, mask=mask)
            tl.store(residual_out + at + 3 * H, b3, mask=mask)
        r0 = b0.to(tl.float32)
        r1 = b1.to(tl.float32)
        r2 = b2.to(tl.float32)
        r3 = b3.to(tl.float32)
        if EXPAND:
            stream_sq += sum8(r0 * r0)
        elif weight is not None:
            stream_sq += sum8(r0 * r0 + r1 * r1 + r2 * r2 + r3 * r3)
        if collapsed is not None:
            # u = bf16( sum_j q_j * R'_j )
            if pre_mix is not None:
                u = tl.fma(q3, r3, tl.fma(q2, r2, tl.fma(q1, r1, q0 * r0))).to(tl.bfloat16)
            else:
                u = b0
            tl.store(collapsed + row[:, None] * H + cols[None, :], u, mask=mask)
            collapse_sq += sum8(u.to(tl.float32) * u.to(tl.float32))
        if aux is not None:
            mean = ((r0 + r1 + r2 + r3) * 0.25).to(tl.bfloat16)
            tl.store(aux + row[:, None] * H + cols[None, :], mean, mask=mask)
        if weight is not None:
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

    if partials is not None:
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
        elif weight is not None:
            k = tl.arange(0, 32)[None, :]
            tl.store(out[:, None] + k, acc, mask=mask & (k < 24))
        if weight is not None:
            tl.store(out + 24, tl.sum(stream_sq, axis=1), mask=live)
        if collapsed is not None:
            tl.store(out + 25, tl.sum(collapse_sq, axis=1), mask=live)
