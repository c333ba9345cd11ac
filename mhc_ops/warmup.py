"""Compiles ahead of serving, so that no request pays for it and any T can be captured."""

import itertools

import torch


def warmup(hidden_size, max_tokens, *, device=None):
    """Compile and load every kernel variant that calls with up to `max_tokens` tokens can meet.

    Runs each launch configuration of the device's architecture once on a single token, for every
    combination of optional inputs (post or not, pre_mix or not, norm_weight none, bf16 or fp32).
    A second call costs milliseconds.

    Args:
        hidden_size: H, a multiple of 128.
        max_tokens: the largest T that will be served, at least 1.
        device: a CUDA or ROCm device; None: the current one. On "cpu" there is nothing to do.

    Returns:
        How many distinct kernel variants are ready; 0 on a CPU.

    Raises:
        ValueError: hidden_size is not a positive multiple of 128, or max_tokens < 1.
    """
    if hidden_size < 1 or hidden_size % 128:
        raise ValueError(f"hidden_size must be a positive multiple of 128, got {hidden_size}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return 0

    from . import configs, launch

    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ready = set()
    with torch.cuda.device(device), torch.no_grad():
        rows = configs.rows(launch.architecture(device.index), hidden_size)
        first_unlimited = configs.lookup(launch.architecture(device.index), hidden_size, max_tokens)
        for config in rows[: rows.index(first_unlimited) + 1]:
            for given, made in single_token_calls(hidden_size, device):
                for step in launch.plan(config, launch.vendor(), given, made):
                    step.kernel[step.grid](*step.args, **step.constants, **step.options)
                    ready.add(variant(step))
        torch.cuda.synchronize(device)
    return len(ready)


def variant(step):
    """What tells one compiled kernel from another: constants, options and argument types."""
    types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in step.args)
    settings = (*step.constants.items(), *step.options.items())
    return step.kernel, types, settings


def single_token_calls(hidden_size, device, tokens=1):
    """(given, made) for every combination of optional inputs. T is no part of a kernel's key."""
    from . import ops, outputs

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    bf16 = torch.bfloat16
    residual = zeros(tokens, 4, hidden_size, dtype=bf16)
    gate = (zeros(24, 4 * hidden_size), zeros(3), zeros(24), 1e-6, 1e-6, 1e-6, 2.0, 20)
    post = (zeros(tokens, hidden_size, dtype=bf16), zeros(tokens, 4), zeros(tokens, 4, 4))
    pre_mixes = (None, zeros(tokens, 4))
    posts = ((None, None, None), post)
    norms = (None, zeros(hidden_size, dtype=bf16), zeros(hidden_size))
    for pre_mix, post_inputs, norm_weight in itertools.product(pre_mixes, posts, norms):
        given = ops.Given(residual, *gate, pre_mix, *post_inputs, norm_weight, 1e-6)
        streams = None if post_inputs[0] is None else outputs.streams(residual)
        post_mix, comb_mix, next_pre_mix = outputs.gates(residual)
        layer_input = outputs.layer_input(residual)
        yield given, ops.Made(streams, post_mix, comb_mix, layer_input, next_pre_mix)
