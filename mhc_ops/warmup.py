"""Compiles ahead of serving, so that no request pays for it and any T can be captured."""

import itertools

import torch

from . import ops, registration


def warmup(hidden_size, max_tokens, *, device=None, operators=None):
    """Compile and load every kernel variant that calls with up to `max_tokens` tokens can meet.

    Runs each launch configuration of the device's architecture once on a single token, for every
    combination of an operator's optional inputs (pre_mix or not, norm_weight none, bf16 or fp32,
    ue8m0 or not).
    A second call costs milliseconds.

    Args:
        hidden_size: H, a multiple of 128.
        max_tokens: the largest T that will be served, at least 1.
        device: a CUDA or ROCm device; None: the current one. On "cpu" there is nothing to do.
        operators: names of the operators that will be called; None: all of them.

    Returns:
        How many distinct kernel variants are ready; 0 on a CPU.

    Raises:
        ValueError: hidden_size is not a positive multiple of 128, max_tokens < 1, or there is no
            such operator.
    """
    if hidden_size < 1 or hidden_size % 128:
        raise ValueError(f"hidden_size must be a positive multiple of 128, got {hidden_size}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    known = list(registration.read_schemas())
    operators = known if operators is None else operators
    for name in operators:
        if name not in known:
            raise ValueError(f"operators must be of {', '.join(known)}, got {name}")
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
            for given, made in single_token_calls(hidden_size, device, operators):
                for step in launch.plan(config, launch.vendor(), given, made):
                    launch.start(step)
                    ready.add(variant(step))
        torch.cuda.synchronize(device)
    return len(ready)


def variant(step):
    """What tells one compiled kernel from another: constants, options and argument types."""
    types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in step.args)
    settings = (*step.constants.items(), *step.options.items())
    return step.kernel, types, settings


def single_token_calls(hidden_size, device, operators=None, tokens=1):
    """(given, made) for every combination of optional inputs. T is no part of a kernel's key."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    bf16 = torch.bfloat16
    choices = {
        "x": [zeros(tokens, hidden_size, dtype=bf16)],
        "residual": [zeros(tokens, 4, hidden_size, dtype=bf16)],
        "residual_out": [zeros(tokens, 4, hidden_size, dtype=bf16)],
        "sublayer_out": [zeros(tokens, hidden_size, dtype=bf16)],
        "post_layer_mix": [zeros(tokens, 4)],
        "comb_res_mix": [zeros(tokens, 4, 4)],
        "pre_mix": [None, zeros(tokens, 4)],
        "fn": [zeros(24, 4 * hidden_size)],
        "hc_scale": [zeros(3)],
        "hc_base": [zeros(24)],
        "hc_post_mult_value": [2.0],
        "sinkhorn_repeat": [20],
        "norm_weight": [None, zeros(hidden_size, dtype=bf16), zeros(hidden_size)],
        "ue8m0": [True, False],
        **{name: [1e-6] for name in ("rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "norm_eps")},
    }
    calls = []
    for operator in registration.read_schemas() if operators is None else operators:
        body = getattr(ops, operator)
        arguments = getattr(torch.ops.mhc, operator).default._schema.arguments
        names = [a.name for a in arguments]
        special = {"fn": [zeros(24, hidden_size)]} if "x" in names else {}
        if any(a.name == "norm_weight" and "Optional" not in str(a.type) for a in arguments):
            special["norm_weight"] = choices["norm_weight"][1:]
        for values in itertools.product(*({**choices, **special}[name] for name in names)):
            body(lambda *call: calls.append(call), **dict(zip(names, values, strict=True)))
    return calls
