"""The GPU backend: configuration, workspace, grids, kernels. ("CUDA" in torch serves ROCm too.)"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from . import configs
from .kernels.gates import gates_kernel
from .kernels.gemm import gemm_kernel
from .kernels.pack import pack_kernel
from .kernels.seam import seam_kernel

# Columns of a row of the workspace: 24 projections, a sum of squares, 7 to make it 128 bytes.
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
    if made.layer_input_scale is not None:
        require_e4m3(architecture(source.device.index))
    if tokens == 0:
        return
    device = source.device.index
    config = configs.lookup(architecture(device), hidden, tokens)
    if device == torch.cuda.current_device():
        _run_again(config, device, given, made)
    else:
        with torch.cuda.device(device):
            _run_again(config, device, given, made)


# {what chooses kernels in a plan: (its Config, [(compiled kernel, its constexprs)])}
_compiled = {}


def _run_again(config, device, given, made):
    """`run_with`, but what Triton compiled for a call serves all that differ in T and addresses
    only, which `check` made sure are aligned alike: to find a kernel by its arguments takes Triton
    longer than to start it."""
    key = (
        id(config),  # of a row that lives as long as the entry
        device,
        _same(made.residual_out, given.residual),
        given.residual is None,
        given.pre_mix is None,
        given.sublayer_out is None,
        given.norm_weight is not None and given.norm_weight.dtype,
        given.source.shape[-1],
        made.residual_out is None,
        made.post_mix is None,
        made.layer_input is None,
        made.layer_input_scale is not None and made.layer_input_scale.dtype,
        made.aux is None,
    )
    steps = plan(config, vendor(), given, made)
    if key in _compiled:
        for step, (kernel, constants) in zip(steps, _compiled[key][1], strict=True):
            kernel[(*step.grid, 1, 1)](*step.args, *constants)
        return
    kernels = []
    for step in steps:
        names = step.kernel.arg_names[len(step.args) :]
        kernels.append((start(step), tuple(step.constants[name] for name in names)))
    _compiled[key] = config, kernels


def run_with(config, vendor, given, made):
    """`run` with the configuration given, on whatever device the kernels can run."""
    for step in plan(config, vendor, given, made):
        start(step)


def start(step):
    """Compile the kernel of a Launch where that is new, and run it. The compiled kernel."""
    return step.kernel[step.grid](*step.args, **step.constants, **step.options)


def plan(config, vendor, given, made):
    """The launches of an operator, in order: what is None in `given` and `made` is left out.

    Workspace comes from torch's allocator at each call, so that streams and graphs are safe by
    construction.
    """
    source = given.source
    tokens, hidden = source.shape[0], source.shape[-1]
    k = hidden if given.residual is None else 4 * hidden
    gates = made.post_mix is not None
    rows = made.residual_out is not None or made.layer_input is not None
    # In place, the projection must not read streams that a row program may have replaced.
    fused = config.fused and rows and gates and not _same(made.residual_out, given.residual)
    cols = config.cols or hidden
    splits = _cdiv(hidden, cols)
    constants = {
        "H": hidden,
        "K": k,
        "SPLITS": splits,
        "COLS": cols,
        "BLOCK_T": config.block_t,
        "BLOCK_H": config.block_h,
        "VENDOR": vendor,
        "FENCE": config.fence,
        "STAGES": config.stages,
        "ROW_BLOCK": config.row_block,
        "BLOCK_K": math.gcd(k, 2048),
        "PDL": config.pdl and vendor == "nvidia",
    }
    pdl = {"launch_pdl": True} if constants["PDL"] else {}

    # Rows that run first also make sum R'^2: without it the projection is tl.dot and nothing else
    # (T = 4096: 178 us, was 198). Side by side that is slower (T = 64: 17.4 us, was 12.7).
    squares = None
    if rows and gates and not config.fused:
        squares = source.new_empty((tokens,), dtype=torch.float32)
    streams = (given.residual, given.sublayer_out)
    post = (_dense(given.post_layer_mix), _dense(given.comb_res_mix))
    layer_input = (made.layer_input, _exponents(made.layer_input_scale))
    row = (_dense(given.pre_mix), given.norm_weight, made.residual_out, *layer_input, made.aux)
    weight, pack, no_pack = given.fn, None, (None, None)
    if gates and config.pack:
        weight = source.new_empty((72, k))
        pack = packing(given.fn, weight, constants, **pdl)
    if rows and not fused:
        # Packing beside the rows is free; a launch of its own takes 2 to 3 us.
        programs, beside = (tokens + pack.grid[0], pack.args) if pack else (tokens, no_pack)
        yield Launch(
            seam_kernel,
            (programs,),
            (*streams, *post, *row, squares, None, None, *beside, tokens, 0, given.norm_eps),
            constants,
            # Fused or not, one number: sum(u^2) must add up in one order.
            {"num_warps": config.warps if config.fused else config.row_warps, **pdl},
        )
    if not gates:
        return

    if pack and (fused or not rows):
        yield pack
    if given.residual is not None and given.sublayer_out is not None and not fused:
        streams, post = (made.residual_out, None), (None, None)  # as they are by now
    if not fused:
        row = (None,) * 6
    partials = source.new_empty((splits, tokens, PARTIALS), dtype=torch.float32)
    programs = _cdiv(tokens, config.block_t) * splits
    if config.fused:
        sizes = (tokens, programs, given.norm_eps)
        yield Launch(
            seam_kernel,
            (programs + (tokens if fused else 0),),
            (*streams, *post, *row, squares, weight, partials, *no_pack, *sizes),
            constants,
            {"num_warps": config.warps, "num_stages": config.stages, **pdl},
        )
    else:
        yield Launch(
            gemm_kernel,
            (programs,),
            (streams[0] if streams[0] is not None else streams[1], weight, partials, tokens),
            {
                "K": k,
                "SPLITS": splits,
                "COLS": cols * (k // hidden),
                "BLOCK_T": config.block_t,
                "BLOCK_K": config.block_h,
                "VENDOR": vendor,
                "SQUARES": squares is None,
                "STAGES": config.stages,
                "PDL": constants["PDL"],
            },
            {"num_warps": config.warps, "num_stages": config.stages, **pdl},
        )
    yield Launch(
        gates_kernel,
        (_cdiv(tokens, config.gate_t),),
        (
            partials,
            squares,
            _dense(given.hc_scale),
            _dense(given.hc_base),
            made.post_mix,
            made.comb_mix,
            made.next_pre_mix,
            tokens,
            given.rms_eps,
            given.hc_pre_eps,
            given.hc_sinkhorn_eps,
            given.hc_post_mult_value,
            given.sinkhorn_repeat,
        ),
        {
            "K": k,
            "SPLITS": splits,
            "SPLIT_BLOCK": config.split_block,
            "GATE_T": config.gate_t,
            "VENDOR": vendor,
            "PDL": constants["PDL"],
        },
        {"num_warps": config.gate_warps, **pdl},
    )


def packing(fn, packed, constants, **options):
    """The launch of its own that fills packed [72, K] bf16."""
    names = ("K", "BLOCK_K", "VENDOR", "PDL")
    return Launch(
        pack_kernel,
        (24 * (constants["K"] // constants["BLOCK_K"]),),
        (fn, packed),
        {name: constants[name] for name in names},
        {"num_warps": 4, **options},
    )


def _cdiv(a, b):
    """triton.cdiv, which a host pays 2 us for."""
    return -(-a // b)


def _same(a, b):
    """Whether two tensors are the same memory. (Compiled ahead of time they have none.)"""
    return a is b or (
        a is not None
        and b is not None
        and not a.is_meta
        and a.numel() > 0
        and a.data_ptr() == b.data_ptr()
    )


def _dense(tensor):
    """A small tensor as the kernels index it; a copy only for unusual strides."""
    return None if tensor is None else tensor.contiguous()


def _exponents(scale):
    """Triton has no e8m0: such a scale goes to a kernel as the bytes that it is."""
    if scale is None or scale.dtype == torch.float32:
        return scale
    return scale.view(torch.uint8)


def require_e4m3(architecture):
    """Raise unless the chip itself converts to OCP e4m3: sm_80 has no FP8, gfx942 only fnuz."""
    if architecture.startswith("sm_"):
        has = int(architecture.removeprefix("sm_")) >= 89
    else:
        has = architecture.startswith(("gfx95", "gfx12"))
    if not has:
        raise RuntimeError(
            "mhc: quantising needs a chip with OCP float8_e4m3fn (sm_89 or newer, gfx950, gfx12), "
            f"got {architecture}"
        )


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
