"""The seam as a chain of kernels, the way serving engines run it: the baseline of bench_seam.py.

    post                  R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
    pre_gemm_sqrsum       m = W . R' and sum R'^2, summed over splits by who reads them
    pre_big_fuse          post' and comb'
    pre_mix               pre'
    head_reduce           u = bf16( sum_j q_j * R'_j )
    add_rmsnorm           layer_input = bf16( u * rsqrt( mean(u^2) + norm_eps ) * w )

The arithmetic is that of mhc_ops.kernels, called, not copied. Up to 256 tokens the first two
are one kernel, ours without the collapse. The weights are split by a launch of their own (`pack`)
where ours are, too. `tune_unfused.py` finds TABLE's numbers.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from mhc_ops import launch, ops
from mhc_ops.kernels.gates import (
    column,
    load_scale_and_bias,
    make_gates,
    make_logits,
    make_pre,
    total,
)
from mhc_ops.kernels.gemm import gemm_kernel
from mhc_ops.kernels.post import fma4, rounded
from mhc_ops.kernels.seam import seam_kernel


class Tile(NamedTuple):
    block_t: int
    block_h: int
    warps: int


class Gemm(NamedTuple):
    block_t: int
    block_h: int  # columns a step
    cols: int | None  # columns a program; None: all
    warps: int
    stages: int
    pack: bool


class Gates(NamedTuple):
    block_t: int
    split_block: int  # splits added a step
    warps: int


class Chain(NamedTuple):
    """The tuning of every kernel for calls of up to max_tokens tokens."""

    max_tokens: int | None
    post: Tile | None  # None: in one kernel with pre_gemm_sqrsum
    pre_gemm_sqrsum: Gemm
    pre_big_fuse: Gates
    pre_mix: Gates
    head_reduce: Tile
    add_rmsnorm: int  # warps


# fmt: off
# H200, triton 3.6.0, by tune_unfused.py. In the last row it found Gates(32, 4, 4) for pre_big_fuse,
# which seam_h200.json was measured with and which spills on triton 3.9.0.
TABLE = (
    Chain(4, None, Gemm(16, 64, 128, 8, 3, False),
          Gates(1, 8, 1), Gates(1, 8, 1), Tile(1, 256, 1), 16),
    Chain(16, None, Gemm(16, 32, 64, 4, 3, False),
          Gates(1, 128, 4), Gates(1, 128, 4), Tile(1, 128, 1), 16),
    Chain(96, None, Gemm(16, 32, 64, 4, 3, False),
          Gates(1, 128, 4), Gates(1, 128, 4), Tile(1, 512, 4), 16),
    Chain(256, None, Gemm(16, 32, 128, 4, 3, False),
          Gates(1, 8, 1), Gates(1, 8, 1), Tile(4, 256, 4), 8),
    Chain(2048, Tile(4, 512, 4), Gemm(64, 64, 320, 4, 3, True),
          Gates(4, 32, 1), Gates(4, 32, 1), Tile(4, 512, 4), 8),
    Chain(8192, Tile(1, 1024, 4), Gemm(64, 128, 1280, 4, 3, True),
          Gates(4, 8, 1), Gates(4, 8, 1), Tile(2, 512, 4), 8),
    Chain(None, Tile(1, 1024, 4), Gemm(64, 128, None, 4, 3, True),
          Gates(4, 8, 1), Gates(4, 8, 1), Tile(1, 1024, 4), 4),
)
# fmt: on


def lookup(tokens):
    return next(row for row in TABLE if row.max_tokens is None or tokens <= row.max_tokens)


@triton.jit
def post_kernel(
    residual,  # [T, 4, H] bf16
    sublayer_out,  # [T, H] bf16
    post_layer_mix,  # [T, 4] fp32
    comb_res_mix,  # [T, 4, 4] fp32
    residual_out,  # [T, 4, H] bf16
    T,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    VENDOR: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    live = t < T
    mask = live & (cols < H)
    at = t * (4 * H) + cols
    r0 = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    r1 = tl.load(residual + at + H, mask=mask, other=0.0).to(tl.float32)
    r2 = tl.load(residual + at + 2 * H, mask=mask, other=0.0).to(tl.float32)
    r3 = tl.load(residual + at + 3 * H, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(sublayer_out + t * H + cols, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(4):
        # R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )
        p = tl.load(post_layer_mix + t * 4 + j, mask=live, other=0.0)
        c0 = tl.load(comb_res_mix + t * 16 + j, mask=live, other=0.0)
        c1 = tl.load(comb_res_mix + t * 16 + 4 + j, mask=live, other=0.0)
        c2 = tl.load(comb_res_mix + t * 16 + 8 + j, mask=live, other=0.0)
        c3 = tl.load(comb_res_mix + t * 16 + 12 + j, mask=live, other=0.0)
        mixed = rounded(fma4(c0, c1, c2, c3, r0, r1, r2, r3, p * x), VENDOR, False)
        tl.store(residual_out + at + j * H, mixed, mask=mask)


@triton.jit
def head_reduce_kernel(
    streams,  # [T, 4, H] bf16: R'
    pre_mix,  # [T, 4] fp32
    collapsed,  # [T, H] bf16: u
    T,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    VENDOR: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    live = t < T
    mask = live & (cols < H)
    # u = bf16( sum_j q_j * R'_j )
    u = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for j in tl.static_range(4):
        q = tl.load(pre_mix + t * 4 + j, mask=live, other=0.0)
        r = tl.load(streams + t * (4 * H) + j * H + cols, mask=mask, other=0.0).to(tl.float32)
        u += q * r
    tl.store(collapsed + t * H + cols, rounded(u, VENDOR, False), mask=mask)


@triton.jit
def add_rmsnorm_kernel(
    collapsed,  # [T, H] bf16: u
    norm_weight,  # [H] bf16 or fp32
    layer_input,  # [T, H] bf16
    norm_eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,  # a power of two, H or more
    VENDOR: tl.constexpr,
):
    # layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    mask = cols < H
    u = tl.load(collapsed + t * H + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(norm_weight + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(u * u, axis=0) / H + norm_eps)
    tl.store(layer_input + t * H + cols, rounded(u * scale * w, VENDOR, False), mask=mask)


@triton.jit(do_not_specialize=["T", "sinkhorn_repeat"])
def pre_big_fuse_kernel(
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2, 7 unused
    hc_scale,  # [3] fp32
    hc_base,  # [24] fp32
    post_mix,  # [T, 4] fp32
    comb_mix,  # [T, 4, 4] fp32
    T,
    rms_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    VENDOR: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sums = total(partials, t, T, SPLITS, SPLIT_BLOCK)
    scale, base = load_scale_and_bias(hc_scale, hc_base)
    make_gates(
        make_logits(sums, column(sums, 24), scale, base, rms_eps, K),
        t,
        t < T,
        post_mix,
        comb_mix,
        None,
        0.0,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        VENDOR,
    )


@triton.jit(do_not_specialize=["T"])
def pre_mix_kernel(
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2, 7 unused
    hc_scale,  # [3] fp32
    hc_base,  # [24] fp32
    next_pre_mix,  # [T, 4] fp32
    T,
    rms_eps,
    hc_pre_eps,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    VENDOR: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sums = total(partials, t, T, SPLITS, SPLIT_BLOCK)
    scale, base = load_scale_and_bias(hc_scale, hc_base)
    logits = make_logits(sums, column(sums, 24), scale, base, rms_eps, K)
    make_pre(logits, t.to(tl.int64), t < T, next_pre_mix, hc_pre_eps, VENDOR)


def tiled(kernel, tile, args, tokens, hidden, vendor):
    grid = (triton.cdiv(tokens, tile.block_t), triton.cdiv(hidden, tile.block_h))
    constants = {
        "H": hidden,
        "BLOCK_T": tile.block_t,
        "BLOCK_H": tile.block_h,
        "VENDOR": vendor,
    }
    return launch.Launch(kernel, grid, args, constants, {"num_warps": tile.warps})


def summed(kernel, tile, args, tokens, k, splits, vendor):
    constants = {
        "K": k,
        "SPLITS": splits,
        "SPLIT_BLOCK": tile.split_block,
        "BLOCK_T": tile.block_t,
        "VENDOR": vendor,
    }
    grid = (triton.cdiv(tokens, tile.block_t),)
    return launch.Launch(kernel, grid, args, constants, {"num_warps": tile.warps})


def projection(chain, vendor, given, made, weight, partials):
    """gemm_kernel on the streams that `post` made, or seam_kernel with post, without collapse."""
    gemm = chain.pre_gemm_sqrsum
    tokens, _, hidden = given.residual.shape
    splits = partials.shape[0]
    programs = triton.cdiv(tokens, gemm.block_t) * splits
    options = {"num_warps": gemm.warps, "num_stages": gemm.stages}
    if chain.post is not None:
        constants = {
            "K": 4 * hidden,
            "SPLITS": splits,
            "COLS": 4 * (gemm.cols or hidden),
            "BLOCK_T": gemm.block_t,
            "BLOCK_K": gemm.block_h,
            "VENDOR": vendor,
            "SQUARES": True,
            "STAGES": gemm.stages,
            "PDL": False,
        }
        args = (made.residual_out, weight, partials, tokens)
        return launch.Launch(gemm_kernel, (programs,), args, constants, options)
    inputs = given.residual, given.sublayer_out, given.post_layer_mix, given.comb_res_mix
    constants = {
        "H": hidden,
        "K": 4 * hidden,
        "SPLITS": splits,
        "COLS": gemm.cols or hidden,
        "BLOCK_T": gemm.block_t,
        "BLOCK_H": gemm.block_h,
        "VENDOR": vendor,
        "FENCE": True,
        "STAGES": gemm.stages,
        "ROW_BLOCK": 1024,
        "BLOCK_K": 512,
        "PDL": False,
    }
    row = (None, None, made.residual_out, None, None, None)
    args = (*inputs, *row, None, weight, partials, None, None, tokens, programs, 0.0)
    return launch.Launch(seam_kernel, (programs + tokens,), args, constants, options)


def plan(chain, vendor, given, made):
    """(name, launch.Launch) of every kernel, in order, for post_pre_delayed with pre_mix and
    norm_weight."""
    tokens, _, hidden = given.residual.shape
    if chain.post is not None:
        inputs = (given.residual, given.sublayer_out, given.post_layer_mix, given.comb_res_mix)
        args = (*inputs, made.residual_out, tokens)
        yield "post", tiled(post_kernel, chain.post, args, tokens, hidden, vendor)

    gemm = chain.pre_gemm_sqrsum
    weight, k = given.fn, 4 * hidden
    if gemm.pack:
        weight = given.residual.new_empty((72, k))
        constants = {"K": k, "BLOCK_K": math.gcd(k, 512), "VENDOR": vendor, "PDL": False}
        yield "pack", launch.packing(given.fn, weight, constants)
    splits = triton.cdiv(hidden, gemm.cols or hidden)
    partials = given.fn.new_empty((splits, tokens, launch.PARTIALS))
    name = "pre_gemm_sqrsum" if chain.post else "post_pre_gemm_sqrsum"
    yield name, projection(chain, vendor, given, made, weight, partials)

    sums = (partials, given.hc_scale, given.hc_base)
    sinkhorn = (given.hc_sinkhorn_eps, given.hc_post_mult_value, given.sinkhorn_repeat)
    args = (*sums, made.post_mix, made.comb_mix, tokens, given.rms_eps, *sinkhorn)
    sizes = (tokens, k, splits, vendor)
    yield "pre_big_fuse", summed(pre_big_fuse_kernel, chain.pre_big_fuse, args, *sizes)
    args = (*sums, made.next_pre_mix, tokens, given.rms_eps, given.hc_pre_eps)
    yield "pre_mix", summed(pre_mix_kernel, chain.pre_mix, args, *sizes)

    collapsed = given.residual.new_empty((tokens, hidden))
    args = (made.residual_out, given.pre_mix, collapsed, tokens)
    yield "head_reduce", tiled(head_reduce_kernel, chain.head_reduce, args, tokens, hidden, vendor)
    args = (collapsed, given.norm_weight, made.layer_input, given.norm_eps)
    constants = {"H": hidden, "BLOCK_H": triton.next_power_of_2(hidden), "VENDOR": vendor}
    options = {"num_warps": chain.add_rmsnorm}
    yield "add_rmsnorm", launch.Launch(add_rmsnorm_kernel, (tokens,), args, constants, options)


def run(given, chain=None, vendor=None):
    """The five outputs of post_pre_delayed."""
    chain = lookup(given.residual.shape[0]) if chain is None else chain
    vendor = launch.vendor() if vendor is None else vendor

    def fill(given, made):
        for _, step in plan(chain, vendor, given, made):
            launch.start(step)

    return ops.post_pre_delayed(fill, *given)
