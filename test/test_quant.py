"""post_pre_delayed_quant: the bits of the seam and then the quantiser, and what that must give."""

import canary
import pytest
import torch
from cases import assert_same_bits, map_tensors, operator
from quant_cases import SCALES, assert_same, carrying, every_maximum, exact
from test_checks import on_meta
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_ops
from mhc_ops import configs, launch, ops, reference
from mhc_ops.testing import make_inputs

H = 256
both = pytest.mark.parametrize("ue8m0", [True, False], ids=["ue8m0", "fp32"])


def quantised(given, ue8m0=True):
    """The five results of the seam with (q, scale) for layer_input."""
    streams, post_mix, comb_mix, *pair, pre_mix = operator("post_pre_delayed_quant")(*given, ue8m0)
    return streams, post_mix, comb_mix, pair, pre_mix


def assert_composed(given, ue8m0):
    """Against post_pre_delayed, quantised on the CPU: what does not depend on this device."""
    streams, post_mix, comb_mix, y, pre_mix = operator("post_pre_delayed")(*given)
    got = quantised(given, ue8m0)
    assert_same(got[3], reference.quantise(y.cpu(), ue8m0))
    assert_same_bits([got[0]], [streams])
    for a, b in zip((*got[1:3], got[4]), (post_mix, comb_mix, pre_mix), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0, 1e4])
def test_the_bits_of_the_composition(device, seed, size, ue8m0):
    everything = make_inputs(130, H, seed=seed, device=device)
    everything = everything._replace(norm_weight=everything.norm_weight * size)
    for tokens in (*range(1, 131),):
        given = map_tensors(lambda v, n=tokens: v[:n] if v.shape[0] == 130 else v, everything)
        assert_composed(given, ue8m0)


@both
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pre_mix", [True, False], ids=["pre_mix", "stream0"])
@pytest.mark.parametrize("tokens", [400, 2100, 4096, pytest.param(8200, marks=pytest.mark.gpu)])
def test_many_tokens(device, seed, tokens, pre_mix, norm_dtype, ue8m0):
    hidden_size = 5120 if device == "cuda" else 128
    options = {"pre_mix": pre_mix, "norm_dtype": norm_dtype}
    assert_composed(make_inputs(tokens, hidden_size, seed=seed, device=device, **options), ue8m0)


@both
def test_quantiser_of_every_maximum(ue8m0):
    y = every_maximum()
    assert_same(reference.quantise(y, ue8m0), exact(y, ue8m0))


@both
def test_quantiser_of_random_values(seed, ue8m0):
    y = (torch.randn(512, 512) * torch.exp2(torch.randint(-20, 20, (512, 1)))).bfloat16()
    assert_same(reference.quantise(y, ue8m0), exact(y, ue8m0))


@pytest.mark.gpu
@both
def test_operator_of_many_maxima(ue8m0):
    for y in every_maximum()[::8].cuda():
        given = carrying(y, device="cuda")
        assert_same_bits([operator("post_pre_delayed")(*given)[3]], [y[None]])
        assert_same(quantised(given, ue8m0)[3], exact(y[None].cpu(), ue8m0))


@both
def test_alone(device, seed, ue8m0):
    """Of many rows, wider than a block of any configuration, and of every maximum."""
    for y in (torch.randn(130, 4224).bfloat16(), every_maximum()):
        got = operator("quantise")(y.to(device), ue8m0)
        assert_same(got, exact(y, ue8m0))


@pytest.mark.gpu
@both
def test_every_configuration_inside_canaries(seed, ue8m0):
    for config in configs.rows(launch.architecture(0), 5120):

        def run(given, made, config=config):
            launch.run_with(config, launch.vendor(), given, made)

        for tokens in (1, 2 * config.block_t + 1):
            given = make_inputs(tokens, 5120, seed=seed + tokens, device="cuda")
            with canary.allocations(at_least=7):
                *_, q, scale, _ = ops.post_pre_delayed_quant(run, *given, ue8m0)
            y = ops.post_pre_delayed(run, *given)[3]
            assert_same((q, scale), reference.quantise(y.cpu(), ue8m0))
            with canary.allocations(at_least=2):
                alone = ops.quantise(run, y, ue8m0)
            assert_same(alone, (q, scale))


@both
def test_error_is_that_of_e4m3(device, seed, ue8m0):
    """Half an ulp of three bits, or of the smallest e4m3: 2^-4 of the value, 2^-10 of the scale."""
    given = make_inputs(65, H, seed=seed, device=device)
    y = operator("post_pre_delayed")(*given)[3].double()
    q, scale = (t.float().double() for t in quantised(given, ue8m0)[3])
    scale = scale.repeat_interleave(32, dim=1)
    assert ((q * scale - y).abs() <= torch.maximum(y.abs() * 2**-4, scale * 2**-10)).all()
    largest = q.abs().unflatten(1, (-1, 32)).amax(-1)
    assert (largest > 208).all() if ue8m0 else (largest == 448).all()


@both
def test_zeros(device, ue8m0):
    given = make_inputs(3, H, device=device)
    given = map_tensors(torch.clone, given)
    given.residual[1], given.sublayer_out[1] = 0, 0
    q, scale = quantised(given, ue8m0)[3]
    assert (q[1].float() == 0).all()
    floor = 2.0**-22 if ue8m0 else torch.tensor(1e-4) / 448
    assert (scale[1].float() == floor).all()
    assert (scale[[0, 2]].float() > floor).all()


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 31, 96])
def test_what_is_not_finite_stays_in_its_group(device, seed, column, value, ue8m0):
    y = torch.randn(H).bfloat16().to(device)
    wanted = [t.clone() for t in quantised(carrying(y, device=device), ue8m0)[3]]
    bad = y.clone()
    bad[column] = value
    q, scale = quantised(carrying(bad, device=device), ue8m0)[3]
    group = column // 32
    hurt = slice(32 * group, 32 * group + 32)
    product = q.float() * scale.float().repeat_interleave(32, dim=1)
    assert product[0, hurt].isnan().all()
    assert not scale[0, group].float().isfinite()
    if ue8m0:
        assert scale.view(torch.uint8)[0, group] == 0xFF
    if ue8m0 or value != value:
        assert q[0, hurt].float().isnan().all()
    others = torch.arange(H, device=device) // 32 != group
    assert_same(
        [q[0][others], scale[0][others[::32]]], [wanted[0][0][others], wanted[1][0][others[::32]]]
    )


@both
def test_a_bad_row_stays_alone(device, seed, ue8m0):
    given = make_inputs(17, H, seed=seed, device=device)
    wanted = quantised(given, ue8m0)[3]
    residual = given.residual.clone()
    residual[3, 0, 5] = torch.nan
    q, scale = quantised(given._replace(residual=residual), ue8m0)[3]
    assert q[3].float().isnan().all()
    assert scale[3].float().isnan().all()
    others = [t for t in range(17) if t != 3]
    assert_same([q[others], scale[others]], [w[others] for w in wanted])


@both
@pytest.mark.parametrize("tokens", [0, 3])
def test_shapes_and_dtypes(device, tokens, ue8m0):
    q, scale = quantised(make_inputs(tokens, H, device=device), ue8m0)[3]
    assert (q.shape, q.dtype) == ((tokens, H), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((tokens, H // 32), SCALES[ue8m0])
    assert q.is_contiguous()
    assert scale.is_contiguous()


@both
def test_opcheck(device, ue8m0):
    given = make_inputs(3, 128, device=device, sinkhorn_repeat=2)
    torch.library.opcheck(operator("post_pre_delayed_quant"), (*given, ue8m0))


def call(given):
    return operator("post_pre_delayed_quant")(*given)


BAD = {
    "H": (lambda: make_inputs(3, 80), "H must be a multiple of 32, got H = 80"),
    "no norm": (lambda: make_inputs(3, H, norm_dtype=None), "norm_weight is missing"),
}


@pytest.mark.parametrize("fault", BAD)
def test_errors(fault):
    make, message = BAD[fault]
    given = make()
    for function in (operator("post_pre_delayed_quant"), mhc_ops.post_pre_delayed_quant):
        with pytest.raises(ValueError, match=f"mhc::post_pre_delayed_quant: {message}"):
            function(*given)
    with pytest.raises(ValueError, match=message):
        call(map_tensors(on_meta, given))
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        call(map_tensors(mode.from_tensor, given))
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend="aot_eager")(given)


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "gfx90a", "gfx942", "gfx1100"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_chips_without_e4m3(monkeypatch, name, tokens):
    """Before anything is launched: the launcher of this CPU's tensors would fail."""
    monkeypatch.setattr(launch, "architecture", lambda index: name)
    message = rf"mhc: quantising needs a chip with OCP float8_e4m3fn .*, got {name}"
    with pytest.raises(RuntimeError, match=message):
        ops.post_pre_delayed_quant(launch.run, *make_inputs(tokens, 128))


@pytest.mark.parametrize("name", ["sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1201"])
def test_chips_with_e4m3(monkeypatch, name):
    monkeypatch.setattr(launch, "architecture", lambda index: name)
    q = ops.post_pre_delayed_quant(launch.run, *make_inputs(0, 128))[3]
    assert q.shape == (0, 128)
