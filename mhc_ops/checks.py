"""The input contract, once: fake kernels, CPU and GPU backend all call `check`."""

import functools
import math
from typing import NamedTuple

import torch

HC_MULT = 4
GATES = HC_MULT * (HC_MULT + 2)
GROUP = 32  # columns that share a scale

_BF16 = (torch.bfloat16,)
_FP32 = (torch.float32,)
ALIGNMENT = 16  # bytes; the kernels load 8 bf16 at a time


class Argument(NamedTuple):
    """What one tensor argument must be. Dimensions are "T", "H", "K" (4 * H) or a number."""

    shapes: tuple[tuple[str | int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    dense: bool  # must be contiguous, and on a GPU 16-byte aligned


ARGUMENTS = {
    "x": Argument((("T", "H"),), _BF16, True),
    "residual": Argument((("T", HC_MULT, "H"),), _BF16, True),
    "residual_out": Argument((("T", HC_MULT, "H"),), _BF16, True),
    "sublayer_out": Argument((("T", "H"),), _BF16, True),
    "post_layer_mix": Argument((("T", HC_MULT), ("T", HC_MULT, 1)), _FP32, False),
    "comb_res_mix": Argument((("T", HC_MULT, HC_MULT),), _FP32, False),
    "pre_mix": Argument((("T", HC_MULT),), _FP32, False),
    "fn": Argument(((GATES, "K"),), _FP32, True),
    "hc_scale": Argument(((3,),), _FP32, False),
    "hc_base": Argument(((GATES,),), _FP32, False),
    "norm_weight": Argument((("H",),), (torch.bfloat16, torch.float32), True),
}
_FOLDED_FN = Argument(((GATES, "H"),), _FP32, True)  # what goes with x


def argument(name, first):
    """What `name` must be in an operator whose first argument is `first`."""
    return _FOLDED_FN if (first, name) == ("x", "fn") else ARGUMENTS[name]


def check(op, tensors, epsilons, sinkhorn_repeat, *, required=(), addresses=True):
    """Raise what the contract says about bad input; return nothing when all is well.

    tensors: {argument name: tensor or None}, first `residual`, or `x` where the model begins.
    required: names of those that must not be None, which PyTorch's dispatcher lets through.
    epsilons: {argument name: float}; like sinkhorn_repeat, None where an operator has none.
    addresses: False under fake tensors, which like meta tensors have no storage to compare.
    """
    for name, tensor in tensors.items():
        if tensor is None and name in required:
            raise ValueError(f"mhc::{op}: {name} is missing")
    first, source = next(iter(tensors.items()))
    streams = () if first == "x" else (HC_MULT,)
    if source.dim() != 2 + len(streams) or source.shape[1:-1] != streams or source.shape[-1] == 0:
        wanted = f"[T, hc_mult, H] with hc_mult = {HC_MULT}" if streams else "[T, H]"
        raise ValueError(f"mhc::{op}: {first} must have shape {wanted}, got {list(source.shape)}")
    tokens, hidden = source.shape[0], source.shape[-1]
    device = source.device
    on_gpu = device.type == "cuda"
    addresses = addresses and device.type != "meta"
    if on_gpu and hidden % 128 != 0:
        raise ValueError(f"mhc::{op}: H must be a multiple of 128 on a GPU, got H = {hidden}")

    for name, tensor in tensors.items():
        if tensor is None:
            continue
        wanted = argument(name, first)
        if tensor.dtype not in wanted.dtypes:
            names = " or ".join(str(d).removeprefix("torch.") for d in wanted.dtypes)
            got = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"mhc::{op}: {name} must have dtype {names}, got {got}")
        allowed = _sizes(wanted, tokens, hidden)
        if list(tensor.shape) not in allowed:
            shapes = " or ".join(
                f"[{', '.join(map(str, shape))}] = {numbers}"
                for shape, numbers in zip(wanted.shapes, allowed, strict=True)
            )
            raise ValueError(
                f"mhc::{op}: {name} must have shape {shapes}, got {list(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(
                f"mhc::{op}: {name} must be on the device of {first}, {device}, got {tensor.device}"
            )
        if wanted.dense:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"mhc::{op}: {name} must be contiguous, got strides {list(tensor.stride())} "
                    f"for shape {list(tensor.shape)}"
                )
            if addresses and on_gpu and tensor.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"mhc::{op}: {name} must be {ALIGNMENT}-byte aligned on a GPU, "
                    f"got an address {tensor.data_ptr() % ALIGNMENT} bytes past a multiple"
                )

    for name, value in epsilons.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"mhc::{op}: {name} must be finite and not negative, got {value}")
    if sinkhorn_repeat is not None and sinkhorn_repeat < 1:
        raise ValueError(f"mhc::{op}: sinkhorn_repeat must be at least 1, got {sinkhorn_repeat}")

    if addresses and tensors.get("residual_out") is not None:
        _check_overlap(op, tensors)


def _sizes(wanted, tokens, hidden):
    """The shapes that an Argument may have, in numbers. Lists differ by their length before a size
    is looked at, tuples do not: of a wrong rank no symbolic size may be guarded on."""
    sizes = {"T": tokens, "H": hidden, "K": HC_MULT * hidden}
    return [[sizes.get(d, d) for d in shape] for shape in wanted.shapes]


@functools.lru_cache(maxsize=4096)
def _rules(names, required, tokens, hidden):
    """[(dtypes, shapes, dense, required)] of the tensors `names`, for `fine`."""
    wanted = {name: argument(name, names[0]) for name in names}
    return [
        (w.dtypes, list(map(tuple, _sizes(w, tokens, hidden))), w.dense, name in required)
        for name, w in wanted.items()
    ]


def fine(names, tensors, epsilons, sinkhorn_repeat, required):
    """Whether `check` would surely say nothing: a third of its time, at every call.

    names, tensors: as the keys and values of what `check` takes, without residual_out.
    """
    source = tensors[0]
    if source is None:
        return False
    shape, device = source.shape, source.device
    on_gpu = device.type == "cuda"
    if len(shape) < 2 or type(shape[0]) is not int or (on_gpu and shape[-1] % 128) or not shape[-1]:
        return False
    rules = _rules(names, required, shape[0], shape[-1])
    for tensor, (dtypes, shapes, dense, must) in zip(tensors, rules, strict=True):
        if tensor is None:
            if must:
                return False
            continue
        if tensor.dtype not in dtypes or tensor.shape not in shapes or tensor.device != device:
            return False
        if dense and not tensor.is_contiguous():
            return False
        if dense and on_gpu and tensor.data_ptr() % ALIGNMENT:
            return False
    return (sinkhorn_repeat is None or sinkhorn_repeat >= 1) and all(
        value is None or 0 <= value < math.inf for value in epsilons
    )


def require_groups(op, hidden_size):
    """Raise ValueError unless every scale has all its columns."""
    if hidden_size % GROUP:
        raise ValueError(f"mhc::{op}: H must be a multiple of {GROUP}, got H = {hidden_size}")


def require_together(op, tensors):
    """Raise ValueError naming the first missing one when only part of `tensors` is given."""
    given = [name for name, tensor in tensors.items() if tensor is not None]
    for name, tensor in tensors.items():
        if given and tensor is None:
            raise ValueError(f"mhc::{op}: {name} is missing; it goes with {', '.join(given)}")


def _check_overlap(op, tensors):
    """residual_out may be all of residual or share no byte with any input."""
    out = tensors["residual_out"]
    begin, end = _extent(out)
    for name, tensor in tensors.items():
        if name == "residual_out" or tensor is None:
            continue
        other_begin, other_end = _extent(tensor)
        if begin < other_end and other_begin < end:
            if name == "residual" and begin == other_begin:
                continue
            raise ValueError(
                f"mhc::{op}: residual_out must not overlap {name} "
                "(all of residual is allowed: that is in place)"
            )


def _extent(tensor):
    """First and one-past-last byte that the tensor touches."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
