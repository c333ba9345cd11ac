"""The row programs: one token, all of H, everything but its gates.

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )                    stored
    aux  = bf16( sum_j R'_j / 4 )                                   stored
    u    = bf16( sum_j q_j * R'_j )                                 kept in registers
    layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )  stored, or quantised first

A whole row in one program needs no second pass over u and waits for no other program. 16,316 tokens
on an H200: 458 us, 1.17 times the copy's.

Operators must agree to the last bit on what they share, although they are compiled apart: so the
sums whose products round are written as fma.
"""

import triton
import triton.language as tl

from .project import fma4, rounded
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
):
    t = token.to(tl.int64)
    EXPAND: tl.constexpr = residual is None
    POST: tl.constexpr = post_layer_mix is not None
    STEPS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    if POST:
        p0 = tl.load(post_layer_mix + t * 4 + 0)
        p1 = tl.load(post_layer_mix + t * 4 + 1)
        p2 = tl.load(post_layer_mix + t * 4 + 2)
        p3 = tl.load(post_layer_mix + t * 4 + 3)
        c00 = tl.load(comb_res_mix + t * 16 + 0)
        c01 = tl.load(comb_res_mix + t * 16 + 1)
        c02 = tl.load(comb_res_mix + t * 16 + 2)
        c03 = tl.load(comb_res_mix + t * 16 + 3)
        c10 = tl.load(comb_res_mix + t * 16 + 4)
        c11 = tl.load(comb_res_mix + t * 16 + 5)
        c12 = tl.load(comb_res_mix + t * 16 + 6)
        c13 = tl.load(comb_res_mix + t * 16 + 7)
        c20 = tl.load(comb_res_mix + t * 16 + 8)
        c21 = tl.load(comb_res_mix + t * 16 + 9)
        c22 = tl.load(comb_res_mix + t * 16 + 10)
        c23 = tl.load(comb_res_mix + t * 16 + 11)
        c30 = tl.load(comb_res_mix + t * 16 + 12)
        c31 = tl.load(comb_res_mix + t * 16 + 13)
        c32 = tl.load(comb_res_mix + t * 16 + 14)
        c33 = tl.load(comb_res_mix + t * 16 + 15)
    if pre_mix is not None:
        q0 = tl.load(pre_mix + t * 4 + 0)
        q1 = tl.load(pre_mix + t * 4 + 1)
        q2 = tl.load(pre_mix + t * 4 + 2)
        q3 = tl.load(pre_mix + t * 4 + 3)

    square = tl.zeros([BLOCK], tl.float32)
    stream_square = tl.zeros([BLOCK], tl.float32)
    collapsed = ()
    for step in tl.static_range(STEPS):
        cols = step * BLOCK + tl.arange(0, BLOCK)
        mask = cols < H
        if EXPAND:
            b0 = tl.load(sublayer_out + t * H + cols, mask=mask, other=0.0)
            b1 = b0
            b2 = b0
            b3 = b0
        else:
            at = residual + t * (4 * H) + cols
            b0 = tl.load(at, mask=mask, other=0.0)
            b1 = tl.load(at + H, mask=mask, other=0.0)
            b2 = tl.load(at + 2 * H, mask=mask, other=0.0)
            b3 = tl.load(at + 3 * H, mask=mask, other=0.0)
        if POST:
            # R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
            x = tl.load(sublayer_out + t * H + cols, mask=mask, other=0.0).to(tl.float32)
            r0 = b0.to(tl.float32)
            r1 = b1.to(tl.float32)
            r2 = b2.to(tl.float32)
            r3 = b3.to(tl.float32)
            b0 = rounded(fma4(c00, c10, c20, c30, r0, r1, r2, r3, p0 * x), VENDOR, False)
            b1 = rounded(fma4(c01, c11, c21, c31, r0, r1, r2, r3, p1 * x), VENDOR, False)
            b2 = rounded(fma4(c02, c12, c22, c32, r0, r1, r2, r3, p2 * x), VENDOR, False)
            b3 = rounded(fma4(c03, c13, c23, c33, r0, r1, r2, r3, p3 * x), VENDOR, False)
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
            if EXPAND:
                stream_square += r0 * r0
            else:
                stream_square += r0 * r0 + r1 * r1 + r2 * r2 + r3 * r3
        if aux is not None:
            mean = rounded((r0 + r1 + r2 + r3) * 0.25, VENDOR, False)
            tl.store(aux + t * H + cols, mean, mask=mask)
        if layer_input is not None:
            # u = bf16( sum_j q_j * R'_j )
            if pre_mix is not None:
                u = tl.fma(q3, r3, tl.fma(q2, r2, tl.fma(q1, r1, q0 * r0)))
                u = rounded(u, VENDOR, False)
            else:
                u = b0
            if norm_weight is None:
                store_layer_input(u, layer_input, layer_input_scale, t, step * BLOCK, H)
            else:
                square += u.to(tl.float32) * u.to(tl.float32)
                collapsed += (u,)

    if squares is not None:
        tl.store(squares + t, tl.sum(stream_square, axis=0))
    if layer_input is not None and norm_weight is not None:
        # layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )
        scale = tl.rsqrt(tl.sum(square, axis=0) / H + norm_eps)
        for step in tl.static_range(STEPS):
            cols = step * BLOCK + tl.arange(0, BLOCK)
            mask = cols < H
            w = tl.load(norm_weight + cols, mask=mask, other=0.0).to(tl.float32)
            normed = rounded(collapsed[step].to(tl.float32) * scale * w, VENDOR, False)
            store_layer_input(normed, layer_input, layer_input_scale, t, step * BLOCK, H)
