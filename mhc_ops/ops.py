"""What each operator does, the same for every backend: check, allocate, run, return.

`run(given, made)` fills the outputs: `reference.run` on the CPU, `launch.run` on a GPU, `fake`
while tracing. Errors, shapes and the order of results are stated here once, so that backends
cannot differ.
"""

import functools
from typing import NamedTuple

import torch

from . import outputs
from .checks import ARGUMENTS, check, fine, require_groups
from .schemas import read_schemas


class Given(NamedTuple):
    """The inputs of an operator, in the schema order of post_pre_delayed; None: it has no such
    input. T tokens, H hidden size, 4 streams."""

    residual: torch.Tensor | None  # [T, 4, H] bf16; None: sublayer_out becomes all four streams
    fn: torch.Tensor | None  # [24, 4 * H] fp32, or [24, H] without residual
    hc_scale: torch.Tensor | None  # [3] fp32
    hc_base: torch.Tensor | None  # [24] fp32
    rms_eps: float | None
    hc_pre_eps: float | None
    hc_sinkhorn_eps: float | None
    hc_post_mult_value: float | None
    sinkhorn_repeat: int | None
    pre_mix: torch.Tensor | None  # [T, 4] fp32; None: the collapse is stream 0
    sublayer_out: torch.Tensor | None  # [T, H] bf16; None: residual already is R', no post
    post_layer_mix: torch.Tensor | None  # [T, 4] or [T, 4, 1] fp32
    comb_res_mix: torch.Tensor | None  # [T, 4, 4] fp32, source stream first
    norm_weight: torch.Tensor | None = None  # [H] bf16 or fp32; None: no norm
    norm_eps: float | None = 1e-6

    @property
    def gate(self):
        """fn to sinkhorn_repeat: what `reference.gates` takes behind the streams."""
        return self[1:9]

    @property
    def source(self):
        """The tensor whose first size is T and whose last is H."""
        return self.sublayer_out if self.residual is None else self.residual


class Made(NamedTuple):
    """The outputs of an operator, for a backend to fill; None: it has no such output."""

    residual_out: torch.Tensor | None  # [T, 4, H] bf16; may be given.residual
    post_mix: torch.Tensor | None  # [T, 4, 1] fp32; with it the two other gates
    comb_mix: torch.Tensor | None  # [T, 4, 4] fp32
    layer_input: torch.Tensor | None  # [T, H] bf16, or float8_e4m3fn with a scale
    next_pre_mix: torch.Tensor | None  # [T, 4] fp32
    aux: torch.Tensor | None = None  # [T, H] bf16
    layer_input_scale: torch.Tensor | None = None  # [T, H / 32] float8_e8m0fnu or fp32


_NO_GATE = (None,) * 8  # fn to sinkhorn_repeat
_NO_POST = (None,) * 3  # sublayer_out to comb_res_mix


def fake(given, made):
    """The backend of fake and meta tensors: shapes are all there is."""


def post_pre_delayed(run, *args, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed", run, given)
    return _fill(run, given, outputs.streams(given.residual))[:5]


def post_pre_delayed_(run, *args, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed_", run, given, given.residual)
    return _fill(run, given, given.residual)[1:5]


def post_pre_delayed_out(run, *args, residual_out, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed_out", run, given, residual_out)
    return _fill(run, given, residual_out)[1:5]


def post_pre_delayed_aux(run, *args, **kwargs):
    given = Given(*args, **kwargs)
    _check("post_pre_delayed_aux", run, given)
    return _fill(run, given, outputs.streams(given.residual), aux=True)[:6]


def post_pre_delayed_quant(
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
    sublayer_out,
    post_layer_mix,
    comb_res_mix,
    norm_weight,
    norm_eps=1e-6,
    ue8m0=True,
):
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    inputs = (pre_mix, sublayer_out, post_layer_mix, comb_res_mix)
    given = Given(residual, *gate, *inputs, norm_weight, norm_eps)
    _check("post_pre_delayed_quant", run, given)
    require_groups("post_pre_delayed_quant", residual.shape[-1])
    quantised = outputs.quantised(residual, ue8m0)
    made = _fill(run, given, outputs.streams(residual), quantised=quantised)
    return *made[:4], made.layer_input_scale, made.next_pre_mix


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
    given = Given(residual, *gate, pre_mix, *_NO_POST, norm_weight, norm_eps)
    _check("pre_delayed", run, given)
    return _fill(run, given, None)[1:5]


def expand_pre_delayed(
    run,
    x,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    norm_weight=None,
    norm_eps=1e-6,
):
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    given = Given(None, *gate, None, x, None, None, norm_weight, norm_eps)
    _check("expand_pre_delayed", run, given)
    return _fill(run, given, outputs.streams(x))[:5]


def post(run, residual, sublayer_out, post_layer_mix, comb_res_mix):
    inputs = (sublayer_out, post_layer_mix, comb_res_mix)
    given = Given(residual, *_NO_GATE, None, *inputs, None, None)
    _check("post", run, given)
    return _fill(run, given, outputs.streams(residual), collapse=False).residual_out


def post_collapse(
    run,
    residual,
    sublayer_out,
    post_layer_mix,
    comb_res_mix,
    pre_mix,
    norm_weight=None,
    norm_eps=1e-6,
):
    inputs = (sublayer_out, post_layer_mix, comb_res_mix)
    given = Given(residual, *_NO_GATE, pre_mix, *inputs, norm_weight, norm_eps)
    _check("post_collapse", run, given)
    made = _fill(run, given, outputs.streams(residual))
    return made.residual_out, made.layer_input


def gates(
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
):
    gate = (fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps)
    gate += (hc_post_mult_value, sinkhorn_repeat)
    given = Given(residual, *gate, None, *_NO_POST, None, None)
    _check("gates", run, given)
    made = _fill(run, given, None, collapse=False)
    return made.post_mix, made.comb_mix, made.next_pre_mix


def quantise(run, x, ue8m0=True):
    given = Given(None, *_NO_GATE, None, x, None, None, None, None)
    _check("quantise", run, given)
    require_groups("quantise", x.shape[-1])
    made = _fill(run, given, None, quantised=outputs.quantised(x, ue8m0))
    return made.layer_input, made.layer_input_scale


_EPSILONS = tuple(name for name in Given._fields if name.endswith("_eps"))
_NAMES = tuple(name for name in Given._fields if name in ARGUMENTS)
# As the schema of the model's entry calls them.
_ENTRY_NAMES = ("x", *(name for name in _NAMES if name not in ("residual", "sublayer_out")))


@functools.cache
def _required(op):
    """The tensors that an operator's schema does not let be None."""
    schema = torch._C.parse_schema(f"mhc::{read_schemas()[op][0]}")
    return frozenset(a.name for a in schema.arguments if str(a.type) == "Tensor")


def _check(op, run, given, residual_out=None):
    required = _required(op)
    residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, _, repeat, *rest = given
    pre_mix, x, post, comb, norm_weight, norm_eps = rest
    weights = (fn, hc_scale, hc_base, pre_mix)
    epsilons = (rms_eps, hc_pre_eps, hc_sinkhorn_eps, norm_eps)
    if "x" in required:
        names, tensors = _ENTRY_NAMES, (x, *weights, post, comb, norm_weight)
    else:
        names, tensors = _NAMES, (residual, *weights, x, post, comb, norm_weight)
    quick = run is not fake and residual_out is None and "residual_out" not in required
    if quick and fine(names, tensors, epsilons, repeat, required):
        return
    tensors = dict(zip(names, tensors, strict=True), residual_out=residual_out)
    epsilons = dict(zip(_EPSILONS, epsilons, strict=True))
    check(op, tensors, epsilons, repeat, required=required, addresses=run is not fake)


def _fill(run, given, residual_out, *, collapse=True, aux=False, quantised=None):
    source = given.source
    post_mix, comb_mix, next_pre_mix = (None,) * 3 if given.fn is None else outputs.gates(source)
    if quantised is None:
        quantised = outputs.layer_input(source) if collapse else None, None
    layer_input, layer_input_scale = quantised
    made = Made(
        residual_out,
        post_mix,
        comb_mix,
        layer_input,
        next_pre_mix,
        outputs.layer_input(source) if aux else None,
        layer_input_scale,
    )
    run(given, made)
    return made
