"""The public functions. Each calls one operator of `torch.ops.mhc`; all are inference only.

The seam between two sublayers, for T tokens, n = 4 streams, hidden size H, K = n * H
(i source stream, j destination stream; arXiv 2512.24880, with V4.1's one-sublayer lag of the
collapse gate):

    R'_j = bf16( p_j * x + sum_i C[i, j] * R_i )                                  post
    m    = W . flatten(R'),   r = rsqrt( sum(R'^2) / K + rms_eps )                project
    pre'  = sigmoid( m[0:4] * r * s0 + b[0:4] ) + hc_pre_eps                      gates
    post' = sigmoid( m[4:8] * r * s1 + b[4:8] ) * hc_post_mult_value
    comb' = sinkhorn( m[8:24] * r * s2 + b[8:24] )      [n, n], source first
    u    = bf16( sum_j q_j * R'_j )                                               collapse
    layer_input = bf16( u * rsqrt( sum(u^2) / H + norm_eps ) * w )                norm
    aux  = bf16( sum_j R'_j / n )
    q, s = layer_input in groups of 32 columns, see quantise                      quantised

x is `sublayer_out`, p `post_layer_mix`, C `comb_res_mix`, q `pre_mix`, W `fn`, s `hc_scale`,
b `hc_base`, w `norm_weight`. Sinkhorn: softmax over j plus eps, columns scaled to sum 1, then
`sinkhorn_repeat - 1` times rows and columns; every division adds hc_sinkhorn_eps below.

Inputs, for every function that takes them:

    residual        [T, 4, H]  bf16, contiguous       the streams R
    x               [T, H]     bf16, contiguous       the model's entry: R'_j = x for every j
    fn              [24, 4*H]  fp32, contiguous       rows 0..3 pre, 4..7 post, 8 + 4i + j comb
                               (with x: [24, H], see fold_fn)
    hc_scale        [3]        fp32, any strides      pre, post, comb
    hc_base         [24]       fp32, any strides
    pre_mix         [T, 4]     fp32, any strides, or None: the collapse is stream 0 of R'
    sublayer_out    [T, H]     bf16, contiguous
    post_layer_mix  [T, 4] or [T, 4, 1]  fp32, any strides
    comb_res_mix    [T, 4, 4]  fp32, any strides
    norm_weight     [H]        bf16 or fp32, contiguous, or None: layer_input is u
    eps values      float, finite and >= 0;  sinkhorn_repeat int >= 1

On a GPU, H is a multiple of 128 and the contiguous inputs are 16-byte aligned. T may be 0.

Outputs, fresh and contiguous: residual_out [T, 4, H] bf16, post_mix [T, 4, 1] fp32, comb_mix
[T, 4, 4] fp32, layer_input and aux [T, H] bf16, next_pre_mix [T, 4] fp32 (the next seam's
pre_mix); layer_input_q [T, H] float8_e4m3fn, layer_input_scale [T, H / 32] float8_e8m0fnu or fp32.
What two functions share they agree on to the last bit, the gates to 1e-6.

Raises ValueError (shape, device, layout, eps), TypeError (dtype) or RuntimeError (an input
requires grad while grad mode is on), before anything is launched or written.
"""

import torch
from torch import Tensor

from .checks import GATES, HC_MULT, require_together


def post_pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole seam.

    Returns:
        residual_out, post_mix, comb_mix, layer_input, next_pre_mix. Shapes, dtypes, errors and
        the formula: see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.post_pre_delayed.default(
        residual, *gate, pre_mix, sublayer_out, post_layer_mix, comb_res_mix, norm_weight, norm_eps
    )


def post_pre_delayed_(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole seam in place: the new streams replace `residual`, saving T * 4 * H * 2 bytes.

    Returns:
        post_mix, comb_mix, layer_input, next_pre_mix. Shapes, dtypes, errors and the formula:
        see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.post_pre_delayed_.default(
        residual, *gate, pre_mix, sublayer_out, post_layer_mix, comb_res_mix, norm_weight, norm_eps
    )


def post_pre_delayed_out(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    residual_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole seam with the new streams written to `residual_out` [T, 4, H] bf16.

    `residual_out` overlaps no input, or is all of `residual`; in compiled code call
    `post_pre_delayed_` for that.

    Returns:
        post_mix, comb_mix, layer_input, next_pre_mix. Shapes, dtypes, errors and the formula:
        see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.post_pre_delayed_out.default(
        residual,
        *gate,
        pre_mix,
        sublayer_out,
        post_layer_mix,
        comb_res_mix,
        norm_weight,
        norm_eps,
        residual_out=residual_out,
    )


def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The seam after post: `residual` already holds R', as when an Engram layer edited it.

    Returns:
        post_mix, comb_mix, layer_input, next_pre_mix. Shapes, dtypes, errors and the formula:
        see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.pre_delayed.default(residual, *gate, pre_mix, norm_weight, norm_eps)


def post_pre_delayed_aux(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole seam, and the mean of the new streams: the hidden state that draft models read.

    Returns:
        residual_out, post_mix, comb_mix, layer_input, next_pre_mix, aux. Shapes, dtypes, errors
        and the formula: see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.post_pre_delayed_aux.default(
        residual, *gate, pre_mix, sublayer_out, post_layer_mix, comb_res_mix, norm_weight, norm_eps
    )


def post_pre_delayed_quant(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    norm_weight: Tensor,
    norm_eps: float = 1e-6,
    ue8m0: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole seam, its layer_input quantised: the bits of `post_pre_delayed`, then `quantise`.

    H is a multiple of 32. `pack_scale` and `block_scale` lay the scales out for GEMMs.

    Returns:
        residual_out, post_mix, comb_mix, layer_input_q, layer_input_scale (float8_e8m0fnu with
        ue8m0, else fp32), next_pre_mix. Shapes, dtypes, errors, formula: see `mhc_ops.functional`.

    Raises:
        RuntimeError: the GPU has no OCP e4m3 (sm_80; gfx942, whose e4m3 is fnuz).
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    post = (sublayer_out, post_layer_mix, comb_res_mix)
    return torch.ops.mhc.post_pre_delayed_quant.default(
        residual, *gate, pre_mix, *post, norm_weight, norm_eps, ue8m0
    )


def expand_pre_delayed(
    x: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The model's entry: `x` [T, H] becomes all four streams, and the first seam's gates are made.

    The streams being equal, `fn` is folded to [24, H] (once, with `fold_fn`), the mean of squares
    is over H, and the collapse is x.

    Returns:
        residual (four copies of x), post_mix, comb_mix, layer_input, next_pre_mix. Shapes,
        dtypes, errors and the formula: see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.expand_pre_delayed.default(x, *gate, norm_weight, norm_eps)


def fold_fn(fn: Tensor) -> Tensor:
    """`fn` [24, 4*H] for four equal streams: W . (x, x, x, x) = fold_fn(W) . x, [24, H] fp32.

    Raises:
        ValueError: fn is not [24, 4*H].  TypeError: fn is not fp32.
    """
    if fn.dim() != 2 or fn.shape[0] != GATES or fn.shape[1] % HC_MULT:
        raise ValueError(f"fold_fn: fn must have shape [{GATES}, 4 * H], got {list(fn.shape)}")
    if fn.dtype != torch.float32:
        got = str(fn.dtype).removeprefix("torch.")
        raise TypeError(f"fold_fn: fn must have dtype float32, got {got}")
    return fn.unflatten(1, (HC_MULT, -1)).sum(1)


def post(
    residual: Tensor,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
) -> Tensor:
    """The first step of a seam alone, where something edits R' before `pre_delayed`.

    Returns:
        residual_out. Shapes, dtypes, errors and the formula: see `mhc_ops.functional`.
    """
    return torch.ops.mhc.post.default(residual, sublayer_out, post_layer_mix, comb_res_mix)


def post_collapse(
    residual: Tensor,
    sublayer_out: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    pre_mix: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """A seam without its gates: the model's exit, or what a decode step waits for.

    With `gates` on its residual_out it is `post_pre_delayed`.

    Returns:
        residual_out, layer_input. Shapes, dtypes, errors and
        the formula: see `mhc_ops.functional`.
    """
    return torch.ops.mhc.post_collapse.default(
        residual,
        sublayer_out,
        post_layer_mix,
        comb_res_mix,
        pre_mix,
        norm_weight,
        norm_eps,
    )


def gates(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of the next seam alone: `residual` already holds R'.

    Returns:
        post_mix, comb_mix, next_pre_mix. Shapes, dtypes, errors and
        the formula: see `mhc_ops.functional`.
    """
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    return torch.ops.mhc.gates.default(residual, *gate)


def mhc_post_pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None,
    sublayer_out: Tensor | None = None,
    post_layer_mix: Tensor | None = None,
    comb_res_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The seam with the argument order and five results that serving engines already use.

    Without `sublayer_out` it runs `pre_delayed` and returns `residual` itself first.
    `residual_out` takes the new streams and may be `residual` (in place).

    Returns:
        residual_out, post_mix, comb_mix, layer_input, next_pre_mix.

    Raises:
        ValueError: part of sublayer_out, post_layer_mix and comb_res_mix is missing, or
            residual_out is given without them. Otherwise as `mhc_ops.functional` says.
    """
    post = {
        "sublayer_out": sublayer_out,
        "post_layer_mix": post_layer_mix,
        "comb_res_mix": comb_res_mix,
    }
    if residual_out is not None:
        require_together("mhc_post_pre_delayed", {**post, "residual_out": residual_out})
    else:
        require_together("mhc_post_pre_delayed", post)
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    if sublayer_out is None:
        return residual, *pre_delayed(residual, *gate, pre_mix, norm_weight, norm_eps)
    rest = (*gate, pre_mix, sublayer_out, post_layer_mix, comb_res_mix, norm_weight, norm_eps)
    if residual_out is None:
        return post_pre_delayed(residual, *rest)
    if residual_out is residual:
        return residual, *post_pre_delayed_(residual, *rest)
    return residual_out, *post_pre_delayed_out(residual, *rest, residual_out=residual_out)
