"""The last launch of an operator with gates: adds the partial sums of project.py, then Sinkhorn."""

import triton
import triton.language as tl


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
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softmax4(a, b, c, d):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    inv = 1.0 / (a + b + c + d)
    return a * inv, b * inv, c * inv, d * inv


@triton.jit
def scale4(a, b, c, d, eps):
    """(a, b, c, d) / (a + b + c + d + eps)"""
    inv = 1.0 / (a + b + c + d + eps)
    return a * inv, b * inv, c * inv, d * inv


@triton.jit
def make_pre(sums, r, row, live, hc_scale, hc_base, next_pre_mix, hc_pre_eps):
    # pre' = sigmoid( m * r * s0 + b ) + eps
    s0 = tl.load(hc_scale)
    for j in tl.static_range(4):
        pre = sigmoid(column(sums, j) * r * s0 + tl.load(hc_base + j)) + hc_pre_eps
        tl.store(next_pre_mix + row * 4 + j, pre, mask=live)


@triton.jit
def make_gates(
    sums,  # [tokens, 32]: m, ...
    square,  # [tokens]: sum R'^2
    t,
    live,
    hc_scale,
    hc_base,
    post_mix,
    comb_mix,
    next_pre_mix,  # or None: made elsewhere
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    K: tl.constexpr,
):
    row = t.to(tl.int64)
    # r = rsqrt( sum(R'^2) / K + rms_eps )
    r = tl.rsqrt(square / K + rms_eps)
    s1 = tl.load(hc_scale + 1)
    s2 = tl.load(hc_scale + 2)
    if next_pre_mix is not None:
        make_pre(sums, r, row, live, hc_scale, hc_base, next_pre_mix, hc_pre_eps)
    for j in tl.static_range(4):
        # post' = sigmoid( m * r * s1 + b ) * mult
        post = sigmoid(column(sums, 4 + j) * r * s1 + tl.load(hc_base + 4 + j))
        tl.store(post_mix + row * 4 + j, post * hc_post_mult_value, mask=live)
    # A[i, j] = m[8 + 4i + j] * r * s2 + b
    r = r * s2
    p00 = column(sums, 8) * r + tl.load(hc_base + 8)
    p01 = column(sums, 9) * r + tl.load(hc_base + 9)
    p02 = column(sums, 10) * r + tl.load(hc_base + 10)
    p03 = column(sums, 11) * r + tl.load(hc_base + 11)
    p10 = column(sums, 12) * r + tl.load(hc_base + 12)
    p11 = column(sums, 13) * r + tl.load(hc_base + 13)
    p12 = column(sums, 14) * r + tl.load(hc_base + 14)
    p13 = column(sums, 15) * r + tl.load(hc_base + 15)
    p20 = column(sums, 16) * r + tl.load(hc_base + 16)
    p21 = column(sums, 17) * r + tl.load(hc_base + 17)
    p22 = column(sums, 18) * r + tl.load(hc_base + 18)
    p23 = column(sums, 19) * r + tl.load(hc_base + 19)
    p30 = column(sums, 20) * r + tl.load(hc_base + 20)
    p31 = column(sums, 21) * r + tl.load(hc_base + 21)
    p32 = column(sums, 22) * r + tl.load(hc_base + 22)
    p33 = column(sums, 23) * r + tl.load(hc_base + 23)
    # P = softmax_j(A) + eps;  P /= sum_i P + eps
    p00, p01, p02, p03 = softmax4(p00, p01, p02, p03)
    p10, p11, p12, p13 = softmax4(p10, p11, p12, p13)
    p20, p21, p22, p23 = softmax4(p20, p21, p22, p23)
    p30, p31, p32, p33 = softmax4(p30, p31, p32, p33)
    eps = hc_sinkhorn_eps
    p00, p10, p20, p30 = scale4(p00 + eps, p10 + eps, p20 + eps, p30 + eps, eps)
    p01, p11, p21, p31 = scale4(p01 + eps, p11 + eps, p21 + eps, p31 + eps, eps)
    p02, p12, p22, p32 = scale4(p02 + eps, p12 + eps, p22 + eps, p32 + eps, eps)
    p03, p13, p23, p33 = scale4(p03 + eps, p13 + eps, p23 + eps, p33 + eps, eps)
    # P /= sum_j P + eps;  P /= sum_i P + eps
    for _ in range(sinkhorn_repeat - 1):
        p00, p01, p02, p03 = scale4(p00, p01, p02, p03, eps)
        p10, p11, p12, p13 = scale4(p10, p11, p12, p13, eps)
        p20, p21, p22, p23 = scale4(p20, p21, p22, p23, eps)
        p30, p31, p32, p33 = scale4(p30, p31, p32, p33, eps)
        p00, p10, p20, p30 = scale4(p00, p10, p20, p30, eps)
        p01, p11, p21, p31 = scale4(p01, p11, p21, p31, eps)
        p02, p12, p22, p32 = scale4(p02, p12, p22, p32, eps)
        p03, p13, p23, p33 = scale4(p03, p13, p23, p33, eps)
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
):
    t = tl.program_id(0) * GATE_T + tl.arange(0, GATE_T)
    sums = total(partials, t, T, SPLITS, SPLIT_BLOCK)
    if squares is None:
        square = column(sums, 24)
    else:
        square = tl.load(squares + t, mask=t < T, other=0.0)
    make_gates(
        sums,
        square,
        t,
        t < T,
        hc_scale,
        hc_base,
        post_mix,
        comb_mix,
        next_pre_mix,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        K,
    )
