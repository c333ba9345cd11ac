"""Calls of the operators as data, run on meta or symbolic tensors, with what came of them.

python meta_calls.py LIBRARY < calls.json > outcomes.json, in a process with the C++ library alone, or
with "mhc_ops" for LIBRARY in one with Python's operators alone.
"""

import json
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

STATIC = ("fn", "hc_scale", "hc_base", "norm_weight")  # no dimension of theirs is T


def describe(tensor):
    """A tensor argument as data; without values, which no Meta kernel reads."""
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def run(call):
    """What a call returned, wrote and guarded on, or the error.

    call: "op"; "arguments" {name: value or description of a tensor}; the rest may be missing:
    "symbolic": "DUCK" (one T for all) or "DYNAMIC" (a T for each tensor); "on_cpu" and "grad": the
    name of a tensor that is on the CPU, or requires grad.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv()) if "symbolic" in call else None

    def make(name, value):
        if not isinstance(value, dict):
            return value
        device = "cpu" if mode or call.get("on_cpu") == name else "meta"
        dtype = getattr(torch, value["dtype"])
        tensor = torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device=device)
        if mode:
            sizes = [DimDynamic.STATIC] * tensor.dim()
            if name not in STATIC:
                sizes[0] = DimDynamic[call["symbolic"]]
            return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))
        return tensor.requires_grad_(call.get("grad") == name)

    given = {name: make(name, value) for name, value in call["arguments"].items()}
    overload = getattr(torch.ops.mhc, call["op"]).default
    before = {k: v._version for k, v in given.items() if isinstance(v, torch.Tensor)}
    try:
        results = overload(**given)
    except Exception as error:
        return {"error": [type(error).__name__, str(error)]}
    results = results if isinstance(results, tuple) else (results,)
    return {
        "results": [
            [str(r.shape), str(r.stride()), str(r.dtype), str(r.device), r.requires_grad]
            for r in results
        ],
        "written": [name for name, version in before.items() if given[name]._version > version],
        "guards": [str(guard.expr) for guard in mode.shape_env.guards] if mode else [],
        "specialised": [str(s) for s in mode.shape_env.replacements.values()] if mode else [],
    }


if __name__ == "__main__":
    if sys.argv[1] == "mhc_ops":
        import mhc_ops  # noqa: F401
    else:
        torch.ops.load_library(sys.argv[1])
    in_cpp = "register.cpp" in torch._C._dispatch_dump("mhc::post")
    assert in_cpp == ("mhc_ops" not in sys.modules)
    json.dump([run(call) for call in json.load(sys.stdin)], sys.stdout)
