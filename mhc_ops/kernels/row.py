"""The row programs: one token, all of H, everything but its gates.

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )                    stored
    aux  = bf16( sum_j R'_j / 4 )                                   stored
    u    = bf16( sum_j q_j * R'_j )                                 kept in registers
    layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )  stored, or quantised first

A whole row in one program needs no second pass over u and waits for no other program. 16,316 tokens
on an H200: 450 us, 1.14 times the copy's.
"""

import triton
import triton.language as tl

from .pdl import after_previous, prefetch
from .post import load_gates, load_streams, mix, rounded, square
from .quantise import store_layer_input


@triton.jit
def row_program(
    residual,  # [T, 4, H] bf16, or None: every R'_j is sublayer_out, the model's entry
    sublayer_out,  # [T, H] bf16, or None: residual already is R'
    post_layer_mix,  # [T, 4] fp32, or None without post
    comb_res_mix,  # [T, 4, 4] fp32, or None without post
    pre_mix,  # [T, 4] fp32, or None: u is stream 0
    norm_weight,  # [H] bf16 or fp32, or None: layer_input is u
    residual_out,  # [T, 4, H] bf16, may be residual; or None without sublayer_out
    layer_input,  # [T, H] bf16, or e4m3 with layer_input_scale; or None: no collapse
    layer_input_scale,  # [T, H / 32] fp32 or, of powers of two the exponents, uint8; or None
    aux,  # [T, H] bf16, or None
    squares,  # [T] fp32: sum R'^2, or of x without residual; or None
    token,
    norm_eps,
    H: tl.constexpr,
    VENDOR: tl.constexpr,
    BLOCK: tl.constexpr,  # columns a step
    PDL: tl.constexpr,
):
    t = token.to(tl.int64)
    EXPAND: tl.constexpr = residual is None
    POST: tl.constexpr = post_layer_mix is not None
    STEPS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    NORM: tl.constexpr = layer_input is not None and norm_weight is not None
    if NORM and PDL:
        LINE: tl.constexpr = 128 // (norm_weight.dtype.element_ty.primitive_bitwidth // 8)
        line = tl.arange(0, BLOCK // LINE) * LINE
        for step in tl.static_range(STEPS):
            prefetch(norm_weight + tl.minimum(step * BLOCK + line, H - 1))
    after_previous(PDL)
    weights = ()
    if NORM:
        # First: cold they take a microsecond, which is a fourth of the time at T = 1.
        for step in tl.static_range(STEPS):
            cols = step * BLOCK + tl.arange(0, BLOCK)
            weights += (tl.load(norm_weight + cols, mask=cols < H, other=0.0),)
    if POST:
        p = load_gates(post_layer_mix, t, None, 4)
        c = load_gates(comb_res_mix, t, None, 16)
    if pre_mix is not None:
        q = load_gates(pre_mix, t, None, 4)

    u_square = tl.zeros([BLOCK], tl.float32)
    stream_square = tl.zeros([BLOCK], tl.float32)
    collapsed = ()
    for step in tl.static_range(STEPS):
        cols = step * BLOCK + tl.arange(0, BLOCK)
        mask = cols < H
        b0, b1, b2, b3 = load_streams(residual, sublayer_out, t, cols, mask, H)
        if POST:
            # R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
            x = tl.load(sublayer_out + t * H + cols, mask=mask, other=0.0)
            b0, b1, b2, b3 = mix(p, c, x, b0, b1, b2, b3, VENDOR, False)
        if residual_out is not None:
            to = residual_out + t * (4 * H) + cols
            tl.store(to, b0, mask=mask)
            tl.store(to + H, b1, mask=mask)
            tl.store(to + 2 * H, b2, mask=mask)
            tl.store(to + 3 * H, b3, mask=mask)
        r0 = b0.to(tl.float32)
        r1 = b1.to(tl.float32)
        r2 = b2.to(tl.float32)
        r3 = b3.to(tl.float32)
        if squares is not None:
            stream_square += square(b0, b1, b2, b3, EXPAND)
        if aux is not None:
            mean = rounded((r0 + r1 + r2 + r3) * 0.25, VENDOR, False)
            tl.store(aux + t * H + cols, mean, mask=mask)
        if layer_input is not None:
            # u = bf16( sum_j q_j * R'_j )
            if pre_mix is not None:
                u = tl.fma(q[3], r3, tl.fma(q[2], r2, tl.fma(q[1], r1, q[0] * r0)))
                u = rounded(u, VENDOR, False)
            else:
                u = b0
            if norm_weight is None:
                store_layer_input(u, layer_input, layer_input_scale, t, step * BLOCK, H)
            else:
                u_square += u.to(tl.float32) * u.to(tl.float32)
                collapsed += (u,)

    if squares is not None:
        tl.store(squares + t, tl.sum(stream_square, axis=0))
    if NORM:
        # layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )
        scale = tl.rsqrt(tl.sum(u_square, axis=0) / H + norm_eps)
        for step in tl.static_range(STEPS):
            normed = collapsed[step].to(tl.float32) * scale * weights[step].to(tl.float32)
            normed = rounded(normed, VENDOR, False)
            store_layer_input(normed, layer_input, layer_input_scale, t, step * BLOCK, H)
