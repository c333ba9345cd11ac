"""The GPU backend: configuration, workspace, grids, kernels. ("CUDA" in torch serves ROCm too.)"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from . import configs
from .kernels.finish import finish_kernel
from .kernels.pack import pack_kernel
from .kernels.seam import seam_kernel

# Columns of a row of the workspace: 24 projections, two sums of squares, 6 to make it 128 bytes.
PARTIALS = 32


class Launch(NamedTuple):
    kernel: triton.JITFunction
    grid: tuple[int, ...]
    args: tuple  # in the kernel's order, constexprs left out
    constants: dict  # constexprs
    options: dict  # num_warps, num_stages


def run(given, made):
    """Fill `made` from `given` on the current stream, without synchronising."""
    source = given.source
    tokens, hidden = source.shape[0], source.shape[-1]
    if tokens == 0:
        return
    with torch.cuda.device(source.device):
        config = configs.lookup(architecture(source.device.index), hidden, tokens)
        run_with(config, vendor(), given, made)


def run_with(config, vendor, given, made):
    """`run` with the configuration given, on whatever device the kernels can run."""
    for kernel, grid, args, constants, options in plan(config, vendor, given, made):
        kernel[grid](*args, **constants, **options)


def plan(config, vendor, given, made):
    """The launches of an operator, in order: what is None in `given` and `made` is left out.

    Workspace comes from torch's allocator at each call, so that streams and graphs are safe by
    construction.
    """
    source = given.source
    tokens, hidden = source.shape[0], source.shape[-1]
    gates = made.post_mix is not None
    norm = given.norm_weight is not None
    k = hidden if given.residual is None else 4 * hidden
    weight = given.fn
    if gates and config.pack:
        weight = source.new_empty((72, k))
        block_k = math.gcd(k, 512)
        yield Launch(
            pack_kernel,
            (24, k // block_k),
            (given.fn, weight),
            {"K": k, "BLOCK_K": block_k},
            {"num_warps": 4},
        )

    cols = config.cols or hidden
    splits = triton.cdiv(hidden, cols)
    partials = None
    if gates or made.layer_input is not None:
        partials = source.new_empty((splits, tokens, PARTIALS), dtype=torch.float32)
    yield Launch(
        seam_kernel,
        (triton.cdiv(tokens, config.block_t), splits),
        (
            given.residual,
            given.sublayer_out,
            _dense(given.post_layer_mix),
            _dense(given.comb_res_mix),
            _dense(given.pre_mix),
            weight,
            made.residual_out,
            made.layer_input,
            made.aux,
            partials,
            tokens,
        ),
        {
            "H": hidden,
            "K": k,
            "COLS": cols,
            "BLOCK_T": config.block_t,
            "BLOCK_H": config.block_h,
            "FENCE": vendor if config.fence else "",
            "STAGES": config.stages,
        },
        {"num_warps": config.warps, "num_stages": config.stages},
    )
    if not (gates or norm):
        return

    gate_programs = triton.cdiv(tokens, config.gate_t) if gates else 0
    norm_cols = config.norm_cols or hidden
    norm_programs = 0
    if norm:
        norm_programs = triton.cdiv(tokens, config.norm_t) * triton.cdiv(hidden, norm_cols)
    yield Launch(
        finish_kernel,
        (gate_programs + norm_programs,),
        (
            partials,
            made.layer_input,
            given.norm_weight,
            _dense(given.hc_scale),
            _dense(given.hc_base),
            made.post_mix,
            made.comb_mix,
            made.next_pre_mix,
            tokens,
            gate_programs,
            given.rms_eps,
            given.hc_pre_eps,
            given.hc_sinkhorn_eps,
            given.hc_post_mult_value,
            given.sinkhorn_repeat,
            given.norm_eps,
        ),
        {
            "H": hidden,
            "K": k,
            "SPLITS": splits,
            "SPLIT_BLOCK": config.split_block,
            "GATE_T": config.gate_t,
            "NORM_T": config.norm_t,
            "NORM_COLS": norm_cols,
            "NORM_BLOCK": config.norm_block,
        },
        {"num_warps": config.finish_warps},
    )


def _dense(tensor):
    """A small tensor as the kernels index it; a copy only for unusual strides."""
    return None if tensor is None else tensor.contiguous()


@functools.cache
def architecture(device_index):
    """sm_90, gfx942, ...: the name that the configuration files use."""
    properties = torch.cuda.get_device_properties(device_index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def vendor():
    return "amd" if torch.version.hip else "nvidia"
