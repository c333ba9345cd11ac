"""Whatever the inputs are within the contract: against float64, and no token touches another."""

import dataclasses

import canary
import pytest
import test_kernels as kernels
import torch
from cases import OPERATORS, assert_same_bits, judged, map_tensors, map_tokens, seam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhc_ops.testing import assert_accurate, make_inputs

SMALL = ("post_layer_mix", "comb_res_mix", "pre_mix", "hc_scale", "hc_base")
EPS = st.sampled_from((1e-20, 1e-6, 1e-3))
# The same examples in every run; fixtures (seed, device) change nothing between examples.
ours = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def inputs(draw, most=40):
    """A `Given` on the CPU with finite values, of at most so many tokens."""
    made = make_inputs(
        draw(st.integers(1, most)),
        128 * draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**16)),
        pre_mix=draw(st.booleans()),
        norm_dtype=draw(st.sampled_from((None, torch.bfloat16, torch.float32))),
        hc_scale=draw(st.sampled_from((0.1, 1, 30))),
        sinkhorn_repeat=draw(st.sampled_from((1, 2, 20))),
    )
    size = 10.0 ** draw(st.integers(-20, 4))
    base = made.hc_base.clone()
    # Sharp, and small enough for fp32 to hold the gates to 2e-5: a logit of 1e4 ends at 1e-3.
    base[8:] *= draw(st.sampled_from((1, 1, 50)))
    return made._replace(
        hc_base=base,
        residual=made.residual * size,
        sublayer_out=made.sublayer_out * size,
        rms_eps=draw(EPS),
        hc_pre_eps=draw(EPS),
        hc_sinkhorn_eps=draw(EPS),
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


def odd_layouts(given, how):
    """`given` with its small tensors laid out as `how` says."""
    present = {k: v for k, v in how.items() if v != "plain" and getattr(given, k) is not None}
    return given._replace(**{k: laid_out(getattr(given, k), v) for k, v in present.items()})


def others_than(rows, results):
    """What belongs to other tokens than `rows`."""
    keep = [t for t in range(results[0].shape[0]) if t not in rows]
    return [r[keep] for r in results]


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
    wanted = seam("post_pre_delayed", given)
    assert_same_bits(seam("post_pre_delayed", odd_layouts(given, how)), wanted)


@ours
@given(
    drawn=inputs(),
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=4),
    argument=st.sampled_from(("residual", "sublayer_out", "post_layer_mix", "comb_res_mix")),
    value=st.sampled_from((torch.nan, torch.inf, -torch.inf, 1e-40, 3e38)),
)
def test_a_row_stays_by_itself(device, drawn, rows, argument, value):
    given = map_tensors(lambda tensor: tensor.to(device), drawn)
    rows = sorted({row % given.residual.shape[0] for row in rows})
    tensor = getattr(given, argument).clone()
    tensor[rows] = value
    got = seam("post_pre_delayed", given._replace(**{argument: tensor}))
    wanted = seam("post_pre_delayed", given)
    assert_same_bits(others_than(rows, got), others_than(rows, wanted))
    if value != value:
        assert all(g[rows].isnan().any() for g in got)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy: what is not finite, denormals
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@settings(ours, max_examples=12)
@given(
    drawn=inputs(most=9),
    how=layouts,
    edge=st.sampled_from(list(kernels.EDGES)),
    row=st.integers(0, 8),
    value=st.sampled_from((None, torch.nan, -torch.inf, 1e-40, 3e38)),
)
def test_any_configuration(drawn, how, edge, row, value):
    """Everything at once, in the interpreter: float64, the CPU, canaries, layouts, one bad row."""
    config = dataclasses.replace(kernels.PLAIN, **kernels.EDGES[edge])
    drawn = drawn._replace(sinkhorn_repeat=min(drawn.sinkhorn_repeat, kernels.FEW))
    rows, residual = [], drawn.residual.clone()
    if value is not None:
        rows = [row % drawn.residual.shape[0]]
        residual[rows] = value
    with canary.allocations(at_least=6):
        results = kernels.seam(config, odd_layouts(drawn._replace(residual=residual), how))
    if value in (torch.nan, -torch.inf):
        assert all(not r[rows].isfinite().any() for r in results)
    got, on_cpu = (others_than(rows, r) for r in (results, seam("post_pre_delayed", drawn)))
    assert_accurate(map_tokens(lambda tensor: others_than(rows, [tensor])[0], drawn), got)
    # A bf16 of R' that falls on the other side moves a gate: 1e-4, times hc_scale.
    near = 5e-4 * drawn.hc_scale.max().item()
    for a, b in zip(got, on_cpu, strict=True):
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=0, atol=near)
