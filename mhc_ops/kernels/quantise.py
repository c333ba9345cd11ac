"""bf16 to e4m3 in groups of 32 columns, each with a scale: what an FP8 GEMM reads."""

import triton
import triton.language as tl


@triton.jit
def quantise(y, UE8M0: tl.constexpr):
    """(q [..., 32] e4m3, scale [..., 1]) of groups y [..., 32]: fp32 that bf16 can hold.

    scale is fp32, or with UE8M0 a power of two, as its exponent: uint8.
    """
    # a = max( max|y|, 1e-4 ), of the bits: as integers NaN is the largest, so that it comes through
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.maximum(tl.max(bits, axis=len(y.shape) - 1, keep_dims=True), 0x38D1B717)
    finite = top < 0x7F800000
    # q = e4m3( y / s ), without a clamp: |y / s| <= 448 (1 + 2^-23), which rounds to 448.
    if UE8M0:
        # s: a / 448 up to a power of two, whose inverse is exact. 448 is 1.75 * 2^8: up to that
        # significand a is 8 exponents above s, past it 7. What is not finite has NaN's exponent.
        exponent = tl.where(finite, ((top + 0x1FFFFF) >> 23) - 8, 255)
        inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000)
        q = (y * inverse.to(tl.float32, bitcast=True)).to(tl.float8e4nv)
        return q, exponent.to(tl.uint8)
    else:
        # s = a / 448. One division a group: with a correctly rounded 1 / s, a step of Newton's
        # rounds y / s correctly (Markstein 1990). But not where s is infinite, nor the sign of 0.
        scale = tl.div_rn(top.to(tl.float32, bitcast=True), 448.0)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse = tl.broadcast_to(inverse, y.shape)
        quotient = y * inverse
        rest = tl.fma(-quotient, tl.broadcast_to(scale, y.shape), y)
        better = tl.fma(rest, inverse, quotient)
        return tl.where(finite & (y != 0), better, quotient).to(tl.float8e4nv), scale


@triton.jit
def store_layer_input(
    y,  # [BLOCK] bf16: a block of one token's columns; those past H are 0 and not stored
    layer_input,  # [T, H] bf16, or e4m3 with scale
    scale,  # [T, H / 32] fp32 or uint8, or None
    t,  # which token
    first,  # which column is the first, a multiple of 32
    H: tl.constexpr,  # a multiple of 32 with scale
):
    if scale is None:
        cols = first + tl.arange(0, y.shape[0])
        tl.store(layer_input + t * H + cols, y, mask=cols < H)
    else:
        GROUPS: tl.constexpr = y.shape[0] // 32
        groups = tl.reshape(y, [GROUPS, 32]).to(tl.float32)
        q, scales = quantise(groups, scale.dtype.element_ty == tl.uint8)
        group = first // 32 + tl.arange(0, GROUPS)[:, None]
        mask = group < H // 32
        tl.store(layer_input + t * H + group * 32 + tl.arange(0, 32)[None, :], q, mask=mask)
        tl.store(scale + t * (H // 32) + group, scales, mask=mask)
