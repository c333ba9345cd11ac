"""What each operator does, the same for every backend: check, allocate, run, return.

`run(given, made)` fills the outputs: `reference.run` on the CPU, `launch.run` on a GPU, `fake`
while tracing. Errors, shapes and the order of results are stated here once, so that backends
cannot differ.
"""

from typing import NamedTuple

import torch

from . import outputs
from .checks import check


class Given(NamedTuple):
    """The inputs of a seam, in schema order. T tokens, H hidden size, 4 streams."""

    residual: torch.Tensor  # [T, 4, H] bf16
    fn: torch.Tensor  # [24, 4 * H] fp32
    hc_scale: torch.Tensor  # [3] fp32
    hc_base: torch.Tensor  # [24] fp32
    rms_eps: float
    hc_pre_eps: float
    hc_sinkhorn_eps: float
    hc_post_mult_value: float
    sinkhorn_repeat: int
    pre_mix: torch.Tensor | None  # [T, 4] fp32; None: the collapse is stream 0
    sublayer_out: torch.Tensor | None  # [T, H] bf16; None: residual already is R', no post
    post_layer_mix: torch.Tensor | None  # [T, 4] or [T, 4, 1] fp32
    comb_res_mix: torch.Tensor | None  # [T, 4, 4] fp32, source stream first
    norm_weight: torch.Tensor | None = None  # [H] bf16 or fp32; None: no norm
    norm_eps: float = 1e-6


class Made(NamedTuple):
    """The outputs of a seam, for a backend to fill."""

    residual_out: torch.Tensor | None  # [T, 4, H] bf16; may be given.residual; None without post
    post_mix: torch.Tensor  # [T, 4, 1] fp32
    comb_mix: torch.Tensor  # [T, 4, 4] fp32
    layer_input: torch.Tensor  # [T, H] bf16
    next_pre_mix: torch.Tensor  # [T, 4] fp32


def fake(given, made):
    """The backend of fake and meta tensors: shapes are all there is."""


def post_pre_delayed(run, *args, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed", run, given)
    return _fill(run, given, outputs.streams(given.residual))


def post_pre_delayed_(run, *args, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed_", run, given, given.residual)
    return _fill(run, given, given.residual)[1:]


def post_pre_delayed_out(run, *args, residual_out, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed_out", run, given, residual_out)
    return _fill(run, given, residual_out)[1:]


def pre_delayed(
    run,
    residual,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    pre_mix,
    norm_weight=None,
    norm_eps=1e-6,
):
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    no_post = (None, None, None)
    given = Given(residual, *gate, pre_mix, *no_post, norm_weight, norm_eps)
    _check("pre_delayed", run, given)
    return _fill(run, given, None)[1:]


def _check(op, run, given, residual_out=None):
    tensors = {
        "residual": given.residual,
        "fn": given.fn,
        "hc_scale": given.hc_scale,
        "hc_base": given.hc_base,
        "pre_mix": given.pre_mix,
        "sublayer_out": given.sublayer_out,
        "post_layer_mix": given.post_layer_mix,
        "comb_res_mix": given.comb_res_mix,
        "norm_weight": given.norm_weight,
        "residual_out": residual_out,
    }
    epsilons = {
        "rms_eps": given.rms_eps,
        "hc_pre_eps": given.hc_pre_eps,
        "hc_sinkhorn_eps": given.hc_sinkhorn_eps,
        "norm_eps": given.norm_eps,
    }
    check(op, tensors, epsilons, given.sinkhorn_repeat, addresses=run is not fake)


def _fill(run, given, residual_out):
    post_mix, comb_mix, next_pre_mix = outputs.gates(given.residual)
    made = Made(residual_out, post_mix, comb_mix, outputs.layer_input(given.residual), next_pre_mix)
    run(given, made)
    return made
