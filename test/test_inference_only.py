"""No operator has a backward: it says so, and works wherever gradients are off."""

import pytest
import torch
from cases import OPERATORS, arguments, assert_same_bits, map_tensors, operator, seam
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_ops.testing import make_inputs

T, H = 5, 256


def floating(name):
    return [a.name for a in operator(name)._schema.arguments if "Tensor" in str(a.type)]


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name in OPERATORS for argument in floating(name)]
)
def test_inputs_that_require_grad(device, name, argument):
    args, kwargs = arguments(name, make_inputs(T, H, device=device))
    names = [a.name for a in operator(name)._schema.arguments]
    tensor = kwargs[argument] if argument in kwargs else args[names.index(argument)]
    before = tensor.detach().clone()
    tensor.requires_grad_()
    message = f"mhc::{name} is inference only and an input requires grad"
    with pytest.raises(RuntimeError, match=message):
        operator(name)(*args, **kwargs)
    assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]
        fake_kwargs = {k: mode.from_tensor(v) for k, v in kwargs.items()}
        with pytest.raises(RuntimeError, match=message):
            operator(name)(*fake, **fake_kwargs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = operator(name)(*args, **kwargs)
        assert not any(r.requires_grad for r in results)


@pytest.mark.parametrize("name", ["post_pre_delayed_", "post_pre_delayed_out"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_autograd_sees_the_mutation(name, mode):
    """A backward that saved the streams before must fail, not use the new ones."""
    args, kwargs = arguments(name, make_inputs(T, H))
    written = kwargs.get("residual_out", args[0])
    before = written._version
    with mode():
        operator(name)(*args, **kwargs)
    assert written._version > before


@pytest.mark.parametrize("name", OPERATORS)
def test_inference_tensors(device, name):
    given = make_inputs(T, H, device=device)
    with torch.inference_mode():
        inside = seam(name, map_tensors(torch.clone, given))
        assert_same_bits(inside, seam(name, given))
