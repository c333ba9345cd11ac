"""R'_j = bf16( p_j * x + sum_i C[i, j] * R_i ), for every kernel that mixes streams.

Operators must agree to the last bit on what they share, although they are compiled apart: so sums
whose products round are written as fma.
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
def fma4(a0, a1, a2, a3, r0, r1, r2, r3, start):
    """start + a0 * r0 + a1 * r1 + a2 * r2 + a3 * r3, rounded in one way only: left to itself a
    compiler fuses either product of a * b + c * d, here the one and there the other."""
    return tl.fma(a3, r3, tl.fma(a2, r2, tl.fma(a1, r1, tl.fma(a0, r0, start))))


@triton.jit
def load_gates(base, t, live, COUNT: tl.constexpr):
    """The COUNT gates of token t, or of tokens t [tokens] as [tokens, 1] with `live` their mask."""
    gates = ()
    for k in tl.static_range(COUNT):
        if live is None:
            gates += (tl.load(base + t * COUNT + k),)
        else:
            gates += (tl.load(base + t * COUNT + k, mask=live, other=0.0)[:, None],)
    return gates


@triton.jit
def mix(p, c, x, b0, b1, b2, b3, VENDOR: tl.constexpr, FENCE: tl.constexpr):
    """The four R'_j of p_j, of c = C[0, 0], C[0, 1], .., C[3, 3], x and the four R_i, all bf16."""
    x = x.to(tl.float32)
    r0 = b0.to(tl.float32)
    r1 = b1.to(tl.float32)
    r2 = b2.to(tl.float32)
    r3 = b3.to(tl.float32)
    b0 = rounded(fma4(c[0], c[4], c[8], c[12], r0, r1, r2, r3, p[0] * x), VENDOR, FENCE)
    b1 = rounded(fma4(c[1], c[5], c[9], c[13], r0, r1, r2, r3, p[1] * x), VENDOR, FENCE)
    b2 = rounded(fma4(c[2], c[6], c[10], c[14], r0, r1, r2, r3, p[2] * x), VENDOR, FENCE)
    b3 = rounded(fma4(c[3], c[7], c[11], c[15], r0, r1, r2, r3, p[3] * x), VENDOR, FENCE)
    return b0, b1, b2, b3


@triton.jit
def load_streams(residual, sublayer_out, t, cols, mask, H: tl.constexpr):
    """The four streams [columns] of token t; sublayer_out four times without residual."""
    if residual is None:
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
    return b0, b1, b2, b3


@triton.jit
def square(b0, b1, b2, b3, EXPAND: tl.constexpr):
    """R'_0^2 + .. + R'_3^2, or of one stream if all are the same."""
    r0 = b0.to(tl.float32)
    total = r0 * r0
    if not EXPAND:
        r1 = b1.to(tl.float32)
        r2 = b2.to(tl.float32)
        r3 = b3.to(tl.float32)
        total = tl.fma(r3, r3, tl.fma(r2, r2, tl.fma(r1, r1, total)))
    return total
