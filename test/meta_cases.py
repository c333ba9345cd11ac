"""Calls of every operator for meta_calls.py: good ones, and ones with each fault."""

import itertools

import torch
from cases import OPTIONAL, operator
from meta_calls import describe
from test_checks import FAULTS, strided

from mhc_ops import fold_fn, schemas
from mhc_ops.testing import make_inputs

OPERATORS = tuple(schemas.read_schemas())
# Every tensor that must not be None. Without its only one PyTorch itself does not find quantise.
REQUIRED = [
    (op, argument.name)
    for op in OPERATORS
    for argument in operator(op)._schema.arguments
    if str(argument.type) == "Tensor" and op != "quantise"
]
T, H = 5, 256


def example(op, tokens=T, **optional):
    """{argument: tensor or value} of an operator."""
    given = make_inputs(tokens, H, **optional)
    named = {**given._asdict(), "x": given.sublayer_out, "residual_out": given.residual}
    named["ue8m0"] = True
    if op == "expand_pre_delayed":
        named["fn"] = fold_fn(given.fn)
    return {a.name: named[a.name] for a in operator(op)._schema.arguments}


def as_call(op, arguments, **options):
    data = {k: describe(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return {"op": op, "arguments": data, **options}


def tensors(arguments):
    return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]


def good_calls():
    for op, optional in itertools.product(OPERATORS, OPTIONAL):
        if op == "post_pre_delayed_quant" and optional["norm_dtype"] is None:
            continue
        symbolic = ((T, {"symbolic": kind}) for kind in ("DUCK", "DYNAMIC"))
        for tokens, options in ((0, {}), (1, {}), (T, {}), *symbolic):
            arguments = example(op, tokens, **optional)
            yield as_call(op, arguments, **options)
            if "post_layer_mix" in arguments:
                arguments["post_layer_mix"] = arguments["post_layer_mix"].squeeze(-1)
                yield as_call(op, arguments, **options)
            if "ue8m0" in arguments:
                yield as_call(op, {**arguments, "ue8m0": False}, **options)


def single_faults():
    faults = {
        **FAULTS,
        "x": {
            "rank": lambda t: t[None],
            "no columns": lambda t: t[:, :0],
            "dtype": lambda t: t.float(),
            "strides": strided,
        },
    }
    # The smallest double, and where Python changes to exponents.
    for value in (-5e-324, -1e-5, -1e-4, -123456.0, -1e15, -1e16, -0.1, -1.5e300):
        faults["rms_eps"] = {**faults["rms_eps"], repr(value): lambda _, value=value: value}
    for op in OPERATORS:
        for argument in example(op):
            for change in faults.get(argument, {}).values():
                arguments = example(op)
                arguments[argument] = change(arguments[argument])
                yield as_call(op, arguments)
                yield as_call(op, arguments, symbolic="DYNAMIC")


def missing():
    for op, argument in REQUIRED:
        yield as_call(op, {**example(op), argument: None})
        yield as_call(op, {**example(op), argument: None}, symbolic="DYNAMIC")


def quantising_faults():
    given = make_inputs(T, 80)._asdict() | {"ue8m0": True}
    for arguments in (given, {**given, "norm_weight": None}):
        yield as_call("post_pre_delayed_quant", arguments)
        yield as_call("post_pre_delayed_quant", arguments, symbolic="DYNAMIC")
    yield as_call("quantise", {"x": given["sublayer_out"], "ue8m0": False})


def several_faults():
    """Which of two errors is reported."""
    for op in OPERATORS:
        for pair in itertools.combinations(tensors(example(op)), 2):
            arguments = example(op)
            yield as_call(op, {k: v.int() if k in pair else v for k, v in arguments.items()})


def other_faults():
    for op in OPERATORS:
        arguments = example(op)
        for name in tensors(arguments):
            if len(tensors(arguments)) > 1:
                yield as_call(op, arguments, on_cpu=name)
            yield as_call(op, arguments, grad=name)
