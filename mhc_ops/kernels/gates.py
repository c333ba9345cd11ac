"""The last launch of an operator with gates: adds the partial sums of project.py, then Sinkhorn."""

import triton
import triton.language as tl

from .pdl import after_previous, prefetch


@triton.jit
def total(partials, t, T, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr):
    """[tokens, 32]: the partials [splits, T, 32] of tokens t, added over the splits in order."""
    k = tl.arange(0, 32)[None, None, :]
    row = t.to(tl.int64)[:, None, None]
    acc = tl.zeros([t.shape[0], 32], tl.float32)
    for first in range(0, SPLITS, SPLIT_BLOCK):
        s = (first + tl.arange(0, SPLIT_BLOCK))[None, :, None]
        at = (s.to(tl.int64) * T + row) * 32 + k
        acc += tl.sum(tl.load(partials + at, mask=(s < SPLITS) & (row < T), other=0.0), axis=1)
    return acc


@triton.jit
def column(sums, k: tl.constexpr):
    """Column k of sums [tokens, 32], as [tokens]."""
    return tl.sum(tl.where(tl.arange(0, 32)[None, :] == k, sums, 0.0), axis=1)


@triton.jit
def reciprocal(x, VENDOR: tl.constexpr):
    """1 / x within an ulp. Triton's own division checks for ranges that do not occur here."""
    if VENDOR == "nvidia":
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, VENDOR: tl.constexpr):
    return reciprocal(1.0 + tl.exp(-x), VENDOR)


@triton.jit
def softmax4(a, b, c, d, eps, VENDOR: tl.constexpr):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    inv = reciprocal((a + b) + (c + d), VENDOR)
    return a * inv + eps, b * inv + eps, c * inv + eps, d * inv + eps


@triton.jit
def dot4(a0, a1, a2, a3, b0, b1, b2, b3, start):
    """start + a . b, in two chains that run side by side"""
    return tl.fma(a1, b1, tl.fma(a0, b0, start)) + tl.fma(a3, b3, a2 * b2)


@triton.jit
def sinkhorn(
    p00, p01, p02, p03, p10, p11, p12, p13, p20, p21, p22, p23, p30, p31, p32, p33,
    eps,
    repeat,
    VENDOR: tl.constexpr,
):  # fmt: skip
    """P /= sum_i P + eps;  repeat - 1 times: P /= sum_j P + eps, P /= sum_i P + eps.

    All of it scales rows and columns: P = r_i * A_ij * c_j for the A that comes in, and a step over
    columns makes c_j / (c_j * sum_i r_i A_ij + eps) of c_j. With d_j = 1 / c_j that is
    d_j = sum_i r_i A_ij + eps * d_j: four fma and a reciprocal, and P is never written out.
    """
    d0 = p00 + p10 + p20 + p30 + eps
    d1 = p01 + p11 + p21 + p31 + eps
    d2 = p02 + p12 + p22 + p32 + eps
    d3 = p03 + p13 + p23 + p33 + eps
    c0 = reciprocal(d0, VENDOR)
    c1 = reciprocal(d1, VENDOR)
    c2 = reciprocal(d2, VENDOR)
    c3 = reciprocal(d3, VENDOR)
    e0 = tl.full(p00.shape, 1.0, tl.float32)  # 1 / r_i
    e1 = e0
    e2 = e0
    e3 = e0
    r0 = e0
    r1 = e0
    r2 = e0
    r3 = e0
    for _ in range(repeat - 1):
        e0 = dot4(p00, p01, p02, p03, c0, c1, c2, c3, eps * e0)
        e1 = dot4(p10, p11, p12, p13, c0, c1, c2, c3, eps * e1)
        e2 = dot4(p20, p21, p22, p23, c0, c1, c2, c3, eps * e2)
        e3 = dot4(p30, p31, p32, p33, c0, c1, c2, c3, eps * e3)
        r0 = reciprocal(e0, VENDOR)
        r1 = reciprocal(e1, VENDOR)
        r2 = reciprocal(e2, VENDOR)
        r3 = reciprocal(e3, VENDOR)
        d0 = dot4(p00, p10, p20, p30, r0, r1, r2, r3, eps * d0)
        d1 = dot4(p01, p11, p21, p31, r0, r1, r2, r3, eps * d1)
        d2 = dot4(p02, p12, p22, p32, r0, r1, r2, r3, eps * d2)
        d3 = dot4(p03, p13, p23, p33, r0, r1, r2, r3, eps * d3)
        c0 = reciprocal(d0, VENDOR)
        c1 = reciprocal(d1, VENDOR)
        c2 = reciprocal(d2, VENDOR)
        c3 = reciprocal(d3, VENDOR)
    return (
        r0 * p00 * c0, r0 * p01 * c1, r0 * p02 * c2, r0 * p03 * c3,
        r1 * p10 * c0, r1 * p11 * c1, r1 * p12 * c2, r1 * p13 * c3,
        r2 * p20 * c0, r2 * p21 * c1, r2 * p22 * c2, r2 * p23 * c3,
        r3 * p30 * c0, r3 * p31 * c1, r3 * p32 * c2, r3 * p33 * c3,
    )  # fmt: skip


@triton.jit
def load_scale_and_bias(hc_scale, hc_base):
    """[32] each: the scale and the bias of the 24 gates."""
    k = tl.arange(0, 32)
    part = tl.where(k < 4, 0, tl.where(k < 8, 1, 2))
    return tl.load(hc_scale + part), tl.load(hc_base + k, mask=k < 24, other=0.0)


@triton.jit
def make_logits(sums, square, scale, base, rms_eps, K: tl.constexpr):
    """[tokens, 32]: m * r * s + b with r = rsqrt( sum(R'^2) / K + rms_eps )"""
    r = tl.rsqrt(square / K + rms_eps)
    return tl.fma(sums, r[:, None] * scale[None, :], tl.broadcast_to(base[None, :], sums.shape))


@triton.jit
def make_pre(logits, row, live, next_pre_mix, hc_pre_eps, VENDOR: tl.constexpr):
    # pre' = sigmoid( m * r * s0 + b ) + eps
    for j in tl.static_range(4):
        pre = sigmoid(column(logits, j), VENDOR) + hc_pre_eps
        tl.store(next_pre_mix + row * 4 + j, pre, mask=live)


@triton.jit
def make_gates(
    logits,  # [tokens, 32]: m * r * s + b
    t,
    live,
    post_mix,
    comb_mix,
    next_pre_mix,  # or None: made elsewhere
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    VENDOR: tl.constexpr,
):
    row = t.to(tl.int64)
    if next_pre_mix is not None:
        make_pre(logits, row, live, next_pre_mix, hc_pre_eps, VENDOR)
    for j in tl.static_range(4):
        # post' = sigmoid( m * r * s1 + b ) * mult
        post = sigmoid(column(logits, 4 + j), VENDOR)
        tl.store(post_mix + row * 4 + j, post * hc_post_mult_value, mask=live)
    # A[i, j] = m[8 + 4i + j] * r * s2 + b
    p00 = column(logits, 8)
    p01 = column(logits, 9)
    p02 = column(logits, 10)
    p03 = column(logits, 11)
    p10 = column(logits, 12)
    p11 = column(logits, 13)
    p12 = column(logits, 14)
    p13 = column(logits, 15)
    p20 = column(logits, 16)
    p21 = column(logits, 17)
    p22 = column(logits, 18)
    p23 = column(logits, 19)
    p30 = column(logits, 20)
    p31 = column(logits, 21)
    p32 = column(logits, 22)
    p33 = column(logits, 23)
    # P = softmax_j(A) + eps, then Sinkhorn
    eps = hc_sinkhorn_eps
    p00, p01, p02, p03 = softmax4(p00, p01, p02, p03, eps, VENDOR)
    p10, p11, p12, p13 = softmax4(p10, p11, p12, p13, eps, VENDOR)
    p20, p21, p22, p23 = softmax4(p20, p21, p22, p23, eps, VENDOR)
    p30, p31, p32, p33 = softmax4(p30, p31, p32, p33, eps, VENDOR)
    (
        p00, p01, p02, p03, p10, p11, p12, p13, p20, p21, p22, p23, p30, p31, p32, p33,
    ) = sinkhorn(
        p00, p01, p02, p03, p10, p11, p12, p13, p20, p21, p22, p23, p30, p31, p32, p33,
        eps, sinkhorn_repeat, VENDOR,
    )  # fmt: skip
    comb = comb_mix + row * 16
    tl.store(comb + 0, p00, mask=live)
    tl.store(comb + 1, p01, mask=live)
    tl.store(comb + 2, p02, mask=live)
    tl.store(comb + 3, p03, mask=live)
    tl.store(comb + 4, p10, mask=live)
    tl.store(comb + 5, p11, mask=live)
    tl.store(comb + 6, p12, mask=live)
    tl.store(comb + 7, p13, mask=live)
    tl.store(comb + 8, p20, mask=live)
    tl.store(comb + 9, p21, mask=live)
    tl.store(comb + 10, p22, mask=live)
    tl.store(comb + 11, p23, mask=live)
    tl.store(comb + 12, p30, mask=live)
    tl.store(comb + 13, p31, mask=live)
    tl.store(comb + 14, p32, mask=live)
    tl.store(comb + 15, p33, mask=live)


@triton.jit(
    do_not_specialize=["T", "sinkhorn_repeat"],
    do_not_specialize_on_alignment=["hc_scale", "hc_base"],
)
def gates_kernel(
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2 unless in squares
    squares,  # [T] fp32: sum R'^2, or None
    hc_scale,  # [3] fp32
    hc_base,  # [24] fp32
    post_mix,  # [T, 4] fp32
    comb_mix,  # [T, 4, 4] fp32
    next_pre_mix,  # [T, 4] fp32
    T,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    K: tl.constexpr,  # columns that the mean of R'^2 is over
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,  # splits added a step
    GATE_T: tl.constexpr,  # tokens a program
    VENDOR: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        prefetch(hc_scale + tl.zeros([1], tl.int32))
        prefetch(hc_base + tl.zeros([1], tl.int32))
    after_previous(PDL)
    scale, base = load_scale_and_bias(hc_scale, hc_base)
    t = tl.program_id(0) * GATE_T + tl.arange(0, GATE_T)
    sums = total(partials, t, T, SPLITS, SPLIT_BLOCK)
    if squares is None:
        square = column(sums, 24)
    else:
        square = tl.load(squares + t, mask=t < T, other=0.0)
    make_gates(
        make_logits(sums, square, scale, base, rms_eps, K),
        t,
        t < T,
        post_mix,
        comb_mix,
        next_pre_mix,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        VENDOR,
    )
