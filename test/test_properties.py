"""Whatever the inputs are within the contract: against float64, and no token touches another."""

import canary
import pytest
import torch
from cases import OPERATORS, assert_same_bits, judged, map_tensors, seam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhc_ops.testing import assert_accurate, make_inputs

PER_TOKEN = ("residual", "sublayer_out", "post_layer_mix", "comb_res_mix", "pre_mix")
SMALL = ("post_layer_mix", "comb_res_mix", "pre_mix", "hc_scale", "hc_base")
EPS = st.sampled_from((1e-20, 1e-6, 1e-3))
# The same examples in every run; fixtures (seed, device) change nothing between examples.
ours = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def inputs(draw):
    """A `Given` on the CPU with finite values."""
    made = make_inputs(
        draw(st.integers(1, 40)),
        128 * draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**16)),
        pre_mix=draw(st.booleans()),
        norm_dtype=draw(st.sampled_from((None, torch.bfloat16, torch.float32))),
        hc_scale=draw(st.sampled_from((0.1, 1, 30))),
        sinkhorn_repeat=draw(st.sampled_from((1, 2, 20))),
    )
    size = 10.0 ** draw(st.integers(-20, 4))
    return made._replace(
        residual=made.residual * size,
        sublayer_out=made.sublayer_out * size,
        rms_eps=draw(EPS),
        hc_pre_eps=draw(EPS),
        hc_sinkhorn_eps=draw(st.sampled_from((1e-6, 1e-3))),
        hc_post_mult_value=draw(st.sampled_from((0.5, 1.0, 2.0))),
        norm_eps=draw(EPS),
    )


def laid_out(tensor, how):
    """The same values with other strides, or from the middle of a storage."""
    if how == "offset":
        return torch.cat([tensor.new_ones(3), tensor.flatten()])[3:].view(tensor.shape)
    if how == "padded":
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.nan)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


layouts = st.fixed_dictionaries(
    {name: st.sampled_from(("plain", "offset", "padded", "transposed")) for name in SMALL}
)


@pytest.mark.parametrize("name", OPERATORS)
@ours
@given(drawn=inputs())
def test_float64(device, name, drawn):
    given = map_tensors(lambda tensor: tensor.to(device), drawn)
    with canary.allocations(at_least=1):
        results = seam(name, given)
    assert_accurate(judged(name, given), results)


@ours
@given(drawn=inputs(), how=layouts)
def test_layouts_of_the_small_tensors(device, drawn, how):
    given = map_tensors(lambda tensor: tensor.to(device), drawn)
    odd = {
        name: laid_out(getattr(given, name), layout)
        for name, layout in how.items()
        if layout != "plain" and getattr(given, name) is not None
    }
    wanted = seam("post_pre_delayed", given)
    assert_same_bits(seam("post_pre_delayed", given._replace(**odd)), wanted)


@ours
@given(
    drawn=inputs(),
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=4),
    argument=st.sampled_from(("residual", "sublayer_out", "post_layer_mix", "comb_res_mix")),
    value=st.sampled_from((torch.nan, torch.inf, -torch.inf, 1e-40, 3e38)),
)
def test_a_row_stays_by_itself(device, drawn, rows, argument, value):
    given = map_tensors(lambda tensor: tensor.to(device), drawn)
    tokens = given.residual.shape[0]
    rows = sorted({row % tokens for row in rows})
    others = [t for t in range(tokens) if t not in rows]
    tensor = getattr(given, argument).clone()
    tensor[rows] = value
    got = seam("post_pre_delayed", given._replace(**{argument: tensor}))
    wanted = seam("post_pre_delayed", given)
    assert_same_bits([g[others] for g in got], [w[others] for w in wanted])
    if value != value:
        assert all(g[rows].isnan().any() for g in got)
