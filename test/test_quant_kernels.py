"""The quantising row programs under Triton's interpreter, and how it converts e4m3."""

import dataclasses

import bf16_interpreter  # noqa: F401  before any kernel runs
import canary
import pytest
import torch
import triton
import triton.language as tl
from cases import assert_same_bits, without_post
from quant_cases import SCALES, assert_same, carrying, every_maximum, exact

from mhc_ops import configs, launch, ops, outputs, reference
from mhc_ops.ops import Made
from mhc_ops.testing import make_inputs

pytestmark = [
    pytest.mark.interpreter,
    # NaN in a bad row, and in the unused columns of a workspace.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    # Triton 3.6.0's interpreter under numpy 2.3
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

FUSED, *_, SPLIT = configs.rows("default", 5120)
both = pytest.mark.parametrize("ue8m0", [True, False], ids=["ue8m0", "fp32"])


def backend(config):
    return lambda given, made: launch.run_with(config, "", given, made)


def collapsed(given, ue8m0=None, config=FUSED):
    """layer_input alone, of the row programs alone; quantised unless ue8m0 is None."""
    given = ops.Given(given.residual, *(None,) * 8, *given[9:])
    plain = (outputs.layer_input(given.residual), None)
    layer_input, scale = plain if ue8m0 is None else outputs.quantised(given.residual, ue8m0)
    streams = outputs.streams(given.residual)
    made = Made(streams, None, None, layer_input, None, layer_input_scale=scale)
    backend(config)(given, made)
    return (layer_input,) if ue8m0 is None else (layer_input, scale)


@triton.jit
def to_e4m3(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.float8e4nv))


@triton.jit
def from_e4m3(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.float32))


def test_conversions_are_those_of_torch():
    """Every e4m3, every middle between two, a little to each side, and what has none."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.empty(256)
    from_e4m3[(1,)](codes, values, 256)
    assert_same([values], [codes.float()])
    finite = values[:127]
    middle = (finite[1:] + finite[:-1]) / 2
    near = [middle.nextafter(torch.tensor(to)) for to in (0.0, 1e9)]
    x = torch.cat((finite, middle, *near, torch.tensor([448.001, 1e9, torch.inf, torch.nan, 1e-9])))
    x = torch.cat((x, -x))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)), value=1.0)
    y = torch.empty(1024, dtype=torch.float8_e4m3fn)
    to_e4m3[(1,)](x, y, 1024)
    assert_same([y], [x.clamp(-448, 448).to(torch.float8_e4m3fn)])


@both
@pytest.mark.parametrize("part", range(4))
def test_group_maxima(part, ue8m0):
    """A sixth of the exponents, all significands; the device tests have all."""
    for y in every_maximum()[part::24]:
        given = carrying(y)
        assert_same_bits(collapsed(given), [y[None]])
        assert_same(collapsed(given, ue8m0), exact(y[None], ue8m0))


@both
@pytest.mark.parametrize("row_block", [128, 256, 1024])
@pytest.mark.parametrize("hidden_size", [128, 384, 640])
def test_blocks(seed, hidden_size, row_block, ue8m0):
    """One block, several, and the last one partly past H."""
    config = dataclasses.replace(FUSED, row_block=row_block)
    given = make_inputs(3, hidden_size, seed=seed)
    with canary.allocations(at_least=3):
        got = collapsed(given, ue8m0, config)
    assert_same(got, reference.quantise(*collapsed(given, config=config), ue8m0))


@both
@pytest.mark.parametrize("config", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_operator(seed, norm_dtype, config, ue8m0):
    given = make_inputs(17, 256, seed=seed, sinkhorn_repeat=2, norm_dtype=norm_dtype)
    with canary.allocations(at_least=7):
        streams, *gates, q, scale, pre = ops.post_pre_delayed_quant(backend(config), *given, ue8m0)
    assert scale.dtype == SCALES[ue8m0]
    plain = ops.post_pre_delayed(backend(config), *given)
    assert_same((q, scale), reference.quantise(plain[3], ue8m0))
    assert_same_bits((streams, *gates, pre), (*plain[:3], plain[4]))


@both
@pytest.mark.parametrize("hidden_size", [128, 640])
def test_alone(seed, hidden_size, ue8m0):
    x = torch.randn(5, hidden_size).bfloat16()
    with canary.allocations(at_least=2):
        got = ops.quantise(backend(FUSED), x, ue8m0)
    assert_same(got, exact(x, ue8m0))


@both
def test_other_operators_could_quantise_too(seed, ue8m0):
    """The row programs of pre_delayed and expand_pre_delayed take a scale as well."""
    given = make_inputs(5, 256, seed=seed)
    expand = given._replace(pre_mix=None, post_layer_mix=None, comb_res_mix=None)
    for one in (without_post(given), expand._replace(residual=None)):
        y = torch.empty(5, 256, dtype=torch.bfloat16)
        for pair in ((y, None), outputs.quantised(y, ue8m0)):
            streams = outputs.streams(y) if one.residual is None else None
            made = Made(streams, None, None, pair[0], None, layer_input_scale=pair[1])
            backend(FUSED)(one, made)
        assert_same(pair, reference.quantise(y, ue8m0))


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group(seed, value, ue8m0):
    y = torch.randn(256).bfloat16()
    wanted = collapsed(carrying(y), ue8m0)
    y[40] = value
    q, scale = collapsed(carrying(y), ue8m0)
    assert_same((q, scale), reference.quantise(y[None], ue8m0))
    assert q[0, 40].float().isnan()
    assert not scale[0, 1].float().isfinite()
    groups = [0, *range(2, 8)]
    assert_same([scale[0, groups]], [wanted[1][0, groups]])
    others = torch.arange(256) // 32 != 1
    assert_same([q[0, others]], [wanted[0][0, others]])


@both
def test_zeros(ue8m0):
    q, scale = collapsed(carrying(torch.zeros(128).bfloat16()), ue8m0)
    assert (q.view(torch.uint8) == 0).all()
    assert (scale.float() == (2.0**-22 if ue8m0 else torch.tensor(1e-4) / 448)).all()
