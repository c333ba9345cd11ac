"""torch.library.opcheck: schema, fake tensors, autograd registration and AOT dispatch agree."""

import pytest
import torch
from cases import OPERATORS, OPTIONAL, arguments, label, map_tensors, operator

from mhc_ops.testing import make_inputs

T, H = 3, 128


@pytest.mark.parametrize("optional", OPTIONAL, ids=label)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(device, name, optional):
    given = make_inputs(T, H, device=device, sinkhorn_repeat=2, **optional)
    torch.library.opcheck(operator(name), *arguments(name, given))


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_of_inputs_that_require_grad(device, name):
    """opcheck's autograd test passes anything unless an input requires grad: with one, the
    operators must refuse while grad mode is on, and hold everything else while it is off."""
    given = make_inputs(T, H, device=device, sinkhorn_repeat=2)
    args, kwargs = arguments(name, map_tensors(torch.Tensor.requires_grad_, given))
    if name == "post_pre_delayed_":
        # A clone of a leaf would be part of a graph already.
        args[0] = args[0].detach()
    with pytest.raises(RuntimeError, match="inference only"):
        operator(name)(*args, **kwargs)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        torch.library.opcheck(operator(name), args, kwargs, test_utils=tests)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_of_few_tokens(device, name, tokens):
    given = make_inputs(tokens, H, device=device, sinkhorn_repeat=2)
    torch.library.opcheck(operator(name), *arguments(name, given))
