"""Bad input gets a clear error, the same everywhere, before anything is written."""

import pytest
import torch
from cases import OPERATORS, POST_INPUTS, arguments, assert_same_bits, map_tensors, operator, seam
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_ops
from mhc_ops.testing import make_inputs

T, H = 5, 256


def strided(tensor):
    """The same values in storage with gaps."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


# argument -> {what is wrong: how to make it wrong}
FAULTS = {
    "residual": {
        "rank": lambda t: t.flatten(1),
        "hc_mult": lambda t: t[:, :3].contiguous(),
        "no columns": lambda t: t[..., :0],
        "dtype": lambda t: t.float(),
        "strides": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    },
    "fn": {
        "rows": lambda t: t[:23],
        "columns": lambda t: t[:, :-4].contiguous(),
        "dtype": lambda t: t.bfloat16(),
        "strides": lambda t: t.t().contiguous().t(),
    },
    "hc_scale": {"shape": lambda t: t[:1], "dtype": lambda t: t.double()},
    "hc_base": {"shape": lambda t: t[:, None], "dtype": lambda t: t.half()},
    "pre_mix": {
        "one token for all": lambda t: t[:1],
        "rank": lambda t: t[..., None],
        "dtype": lambda t: t.bfloat16(),
    },
    "sublayer_out": {
        "tokens": lambda t: t[:-1],
        "columns": lambda t: t[:, :128].contiguous(),
        "dtype": lambda t: t.half(),
        "strides": strided,
    },
    "post_layer_mix": {
        "shape": lambda t: t.expand(T, 4, 2),
        "tokens": lambda t: t[1:],
        "dtype": lambda t: t.bfloat16(),
    },
    "comb_res_mix": {"shape": lambda t: t.flatten(1), "dtype": lambda t: t.double()},
    "norm_weight": {
        "shape": lambda t: t[None],
        "dtype": lambda t: t.half(),
        "strides": strided,
    },
    "residual_out": {
        "shape": lambda t: t[1:],
        "dtype": lambda t: t.float(),
        "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    },
    "rms_eps": {"negative": lambda _: -1e-6, "nan": lambda _: float("nan")},
    "hc_pre_eps": {"negative": lambda _: -1.0, "inf": lambda _: float("inf")},
    "hc_sinkhorn_eps": {"negative": lambda _: -1e-6},
    "norm_eps": {"nan": lambda _: float("nan")},
    "sinkhorn_repeat": {"zero": lambda _: 0, "negative": lambda _: -20},
}
CASES = [(argument, fault) for argument, faults in FAULTS.items() for fault in faults]


def has(name, argument):
    return any(a.name == argument for a in operator(name)._schema.arguments)


def bad_call(name, argument, fault, convert=lambda t: t):
    """(args, kwargs) of an operator with one fault."""
    args, kwargs = arguments(name, make_inputs(T, H))
    names = [a.name for a in operator(name)._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    named[argument] = FAULTS[argument][fault](named[argument])
    named = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    return [named[n] for n in names if n not in kwargs], {k: named[k] for k in kwargs}


def on_meta(tensor):
    """`tensor.to("meta")` would close the gaps of a strided one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def error_of(function, args, kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller compares type and text
        function(*args, **kwargs)
    return caught.type, str(caught.value)


def test_messages():
    lines = []
    for argument, fault in CASES:
        name = "post_pre_delayed_out" if argument == "residual_out" else "post_pre_delayed"
        kind, text = error_of(operator(name), *bad_call(name, argument, fault))
        lines.append(f"{argument}, {fault}: {kind.__name__}\n  {text}")
    assert_expected_inline(
        "\n".join(lines),
        """\
residual, rank: ValueError
  mhc::post_pre_delayed: residual must have shape [T, hc_mult, H] with hc_mult = 4, got [5, 1024]
residual, hc_mult: ValueError
  mhc::post_pre_delayed: residual must have shape [T, hc_mult, H] with hc_mult = 4, got [5, 3, 256]
residual, no columns: ValueError
  mhc::post_pre_delayed: residual must have shape [T, hc_mult, H] with hc_mult = 4, got [5, 4, 0]
residual, dtype: TypeError
  mhc::post_pre_delayed: residual must have dtype bfloat16, got float32
residual, strides: ValueError
  mhc::post_pre_delayed: residual must be contiguous, got strides [256, 1280, 1] for shape [5, 4, 256]
fn, rows: ValueError
  mhc::post_pre_delayed: fn must have shape [24, K] = [24, 1024], got [23, 1024]
fn, columns: ValueError
  mhc::post_pre_delayed: fn must have shape [24, K] = [24, 1024], got [24, 1020]
fn, dtype: TypeError
  mhc::post_pre_delayed: fn must have dtype float32, got bfloat16
fn, strides: ValueError
  mhc::post_pre_delayed: fn must be contiguous, got strides [1, 24] for shape [24, 1024]
hc_scale, shape: ValueError
  mhc::post_pre_delayed: hc_scale must have shape [3] = [3], got [1]
hc_scale, dtype: TypeError
  mhc::post_pre_delayed: hc_scale must have dtype float32, got float64
hc_base, shape: ValueError
  mhc::post_pre_delayed: hc_base must have shape [24] = [24], got [24, 1]
hc_base, dtype: TypeError
  mhc::post_pre_delayed: hc_base must have dtype float32, got float16
pre_mix, one token for all: ValueError
  mhc::post_pre_delayed: pre_mix must have shape [T, 4] = [5, 4], got [1, 4]
pre_mix, rank: ValueError
  mhc::post_pre_delayed: pre_mix must have shape [T, 4] = [5, 4], got [5, 4, 1]
pre_mix, dtype: TypeError
  mhc::post_pre_delayed: pre_mix must have dtype float32, got bfloat16
sublayer_out, tokens: ValueError
  mhc::post_pre_delayed: sublayer_out must have shape [T, H] = [5, 256], got [4, 256]
sublayer_out, columns: ValueError
  mhc::post_pre_delayed: sublayer_out must have shape [T, H] = [5, 256], got [5, 128]
sublayer_out, dtype: TypeError
  mhc::post_pre_delayed: sublayer_out must have dtype bfloat16, got float16
sublayer_out, strides: ValueError
  mhc::post_pre_delayed: sublayer_out must be contiguous, got strides [512, 2] for shape [5, 256]
post_layer_mix, shape: ValueError
  mhc::post_pre_delayed: post_layer_mix must have shape [T, 4] = [5, 4] or [T, 4, 1] = [5, 4, 1], got [5, 4, 2]
post_layer_mix, tokens: ValueError
  mhc::post_pre_delayed: post_layer_mix must have shape [T, 4] = [5, 4] or [T, 4, 1] = [5, 4, 1], got [4, 4, 1]
post_layer_mix, dtype: TypeError
  mhc::post_pre_delayed: post_layer_mix must have dtype float32, got bfloat16
comb_res_mix, shape: ValueError
  mhc::post_pre_delayed: comb_res_mix must have shape [T, 4, 4] = [5, 4, 4], got [5, 16]
comb_res_mix, dtype: TypeError
  mhc::post_pre_delayed: comb_res_mix must have dtype float32, got float64
norm_weight, shape: ValueError
  mhc::post_pre_delayed: norm_weight must have shape [H] = [256], got [1, 256]
norm_weight, dtype: TypeError
  mhc::post_pre_delayed: norm_weight must have dtype bfloat16 or float32, got float16
norm_weight, strides: ValueError
  mhc::post_pre_delayed: norm_weight must be contiguous, got strides [2] for shape [256]
residual_out, shape: ValueError
  mhc::post_pre_delayed_out: residual_out must have shape [T, 4, H] = [5, 4, 256], got [4, 4, 256]
residual_out, dtype: TypeError
  mhc::post_pre_delayed_out: residual_out must have dtype bfloat16, got float32
residual_out, strides: ValueError
  mhc::post_pre_delayed_out: residual_out must be contiguous, got strides [1024, 1, 4] for shape [5, 4, 256]
rms_eps, negative: ValueError
  mhc::post_pre_delayed: rms_eps must be finite and not negative, got -1e-06
rms_eps, nan: ValueError
  mhc::post_pre_delayed: rms_eps must be finite and not negative, got nan
hc_pre_eps, negative: ValueError
  mhc::post_pre_delayed: hc_pre_eps must be finite and not negative, got -1.0
hc_pre_eps, inf: ValueError
  mhc::post_pre_delayed: hc_pre_eps must be finite and not negative, got inf
hc_sinkhorn_eps, negative: ValueError
  mhc::post_pre_delayed: hc_sinkhorn_eps must be finite and not negative, got -1e-06
norm_eps, nan: ValueError
  mhc::post_pre_delayed: norm_eps must be finite and not negative, got nan
sinkhorn_repeat, zero: ValueError
  mhc::post_pre_delayed: sinkhorn_repeat must be at least 1, got 0
sinkhorn_repeat, negative: ValueError
  mhc::post_pre_delayed: sinkhorn_repeat must be at least 1, got -20""",
    )


@pytest.mark.parametrize(
    ("name", "argument", "fault"),
    [(name, *case) for name in OPERATORS for case in CASES if has(name, case[0])],
)
def test_same_error_everywhere_and_nothing_written(name, argument, fault):
    args, kwargs = bad_call(name, argument, fault)
    before = [v.clone() for v in (args[0], *kwargs.values())]
    kind, text = error_of(operator(name), args, kwargs)
    assert kind is (TypeError if fault == "dtype" else ValueError)
    assert text.startswith(f"mhc::{name}: ")
    assert argument in text
    for now, then in zip((args[0], *kwargs.values()), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))

    assert error_of(getattr(mhc_ops, name), args, kwargs) == (kind, text)
    meta = bad_call(name, argument, fault, on_meta)
    assert error_of(operator(name), *meta) == (kind, text)
    with FakeTensorMode() as mode:
        fake = bad_call(name, argument, fault, mode.from_tensor)
        assert error_of(operator(name), *fake) == (kind, text)


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_on_different_devices(name):
    for argument in ("fn", "hc_scale", "norm_weight"):
        given = make_inputs(T, H)
        elsewhere = given._replace(**{argument: getattr(given, argument).to("meta")})
        wanted = f"{argument} must be on the device of residual, cpu, got meta"
        with pytest.raises(ValueError, match=wanted):
            seam(name, elsewhere)
        with FakeTensorMode() as mode, pytest.raises(ValueError, match=wanted):
            seam(name, map_tensors(mode.from_tensor, elsewhere))


@pytest.mark.parametrize("name", OPERATORS)
def test_hidden_size_without_gpu_support(name):
    """Fake tensors may be on a GPU that is not there."""
    with FakeTensorMode():
        given = map_tensors(lambda t: torch.empty_like(t, device="cuda"), make_inputs(T, 192))
        with pytest.raises(ValueError, match="H must be a multiple of 128 on a GPU, got H = 192"):
            operator(name)(*arguments(name, given)[0], **arguments(name, given)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_hidden_size_on_a_gpu(name):
    with pytest.raises(ValueError, match="H must be a multiple of 128 on a GPU, got H = 192"):
        seam(name, make_inputs(T, 192, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "argument", ["residual", "fn", "sublayer_out", "norm_weight", "residual_out"]
)
def test_unaligned_address_on_a_gpu(argument):
    args, kwargs = arguments("post_pre_delayed_out", make_inputs(T, H, device="cuda"))
    names = [a.name for a in operator("post_pre_delayed_out")._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    tensor = named[argument]
    shifted = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    with pytest.raises(ValueError, match=f"{argument} must be 16-byte aligned on a GPU"):
        torch.ops.mhc.post_pre_delayed_out(**{**named, argument: shifted})


SMALL = ("post_layer_mix", "comb_res_mix", "pre_mix", "hc_scale", "hc_base")


def reversed_dims(tensor):
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def with_offset(tensor):
    shifted = tensor.new_zeros(tensor.numel() + 3)[3:].view(tensor.shape)
    return shifted.copy_(tensor)


@pytest.mark.parametrize("layout", [strided, reversed_dims, with_offset])
@pytest.mark.parametrize("argument", SMALL)
def test_small_tensors_have_any_layout(device, argument, layout):
    given = make_inputs(T, H, device=device)
    other = layout(getattr(given, argument))
    assert torch.equal(other, getattr(given, argument))
    assert_same_bits(
        seam("post_pre_delayed", given._replace(**{argument: other})),
        seam("post_pre_delayed", given),
    )


@pytest.mark.parametrize("argument", SMALL)
def test_small_tensors_may_repeat_one_value(device, argument):
    given = make_inputs(T, H, device=device)
    tensor = getattr(given, argument)
    once = tensor.flatten()[:1].view([1] * tensor.dim()).expand(tensor.shape)
    assert_same_bits(
        seam("post_pre_delayed", given._replace(**{argument: once})),
        seam("post_pre_delayed", given._replace(**{argument: once.contiguous()})),
    )


def test_post_layer_mix_with_and_without_a_last_dimension(device):
    given = make_inputs(T, H, device=device)
    flat = given._replace(post_layer_mix=given.post_layer_mix.squeeze(-1))
    assert_same_bits(seam("post_pre_delayed", flat), seam("post_pre_delayed", given))


def shared_streams(given, begin):
    """`given` and a residual_out that begins `begin` elements into the same storage."""
    size = given.residual.numel()
    storage = given.residual.new_zeros(2 * size)
    residual = storage[:size].view(given.residual.shape).copy_(given.residual)
    return given._replace(residual=residual), storage[begin : begin + size].view(residual.shape)


def run_out(given, residual_out):
    return torch.ops.mhc.post_pre_delayed_out(*given, residual_out=residual_out)


@pytest.mark.parametrize("rows", [1, T - 1])
def test_residual_out_may_not_be_part_of_residual(device, rows):
    given, out = shared_streams(make_inputs(T, H, device=device), rows * 4 * H)
    before = given.residual.clone()
    message = "residual_out must not overlap residual"
    with pytest.raises(ValueError, match=message):
        run_out(given, out)
    with pytest.raises(ValueError, match=message):
        mhc_ops.mhc_post_pre_delayed(*given, residual_out=out)
    assert torch.equal(given.residual, before)


def test_residual_out_beside_residual(device):
    given, out = shared_streams(make_inputs(T, H, device=device), T * 4 * H)
    assert_same_bits((out, *run_out(given, out)), seam("post_pre_delayed", given))


def test_residual_out_all_of_residual(device):
    given = make_inputs(T, H, device=device)
    wanted = seam("post_pre_delayed", given)
    out = given.residual.view(given.residual.shape)
    assert_same_bits((out, *run_out(given, out)), wanted)


def test_residual_out_may_not_overlap_other_inputs(device):
    given = make_inputs(T, H, device=device)
    storage = torch.zeros(T * 5 * H, dtype=torch.bfloat16, device=device)
    out = storage[: T * 4 * H].view(T, 4, H)
    x = storage[T * 4 * H - 8 :][: T * H].view(T, H)
    with pytest.raises(ValueError, match="residual_out must not overlap sublayer_out"):
        run_out(given._replace(sublayer_out=x), out)


def drop_in(given, **kwargs):
    return mhc_ops.mhc_post_pre_delayed(*given, **kwargs)


def test_drop_in_names_what_is_missing():
    given = make_inputs(T, H)
    lines = []
    for argument in POST_INPUTS:
        kind, text = error_of(drop_in, (given._replace(**{argument: None}),), {})
        lines.append(f"{kind.__name__}: {text}")
    nothing = given._replace(**dict.fromkeys(POST_INPUTS))
    kind, text = error_of(drop_in, (nothing,), {"residual_out": given.residual})
    lines.append(f"{kind.__name__}: {text}")
    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: mhc::mhc_post_pre_delayed: sublayer_out is missing; it goes with post_layer_mix, comb_res_mix
ValueError: mhc::mhc_post_pre_delayed: post_layer_mix is missing; it goes with sublayer_out, comb_res_mix
ValueError: mhc::mhc_post_pre_delayed: comb_res_mix is missing; it goes with sublayer_out, post_layer_mix
ValueError: mhc::mhc_post_pre_delayed: sublayer_out is missing; it goes with residual_out""",
    )


def test_drop_in_runs_the_operator_that_it_says(device):
    given = make_inputs(T, H, device=device)
    wanted = seam("post_pre_delayed", given)
    assert_same_bits(drop_in(given), wanted)

    out = torch.empty_like(given.residual)
    results = drop_in(given, residual_out=out)
    assert results[0] is out
    assert_same_bits(results, wanted)

    no_post = given._replace(**dict.fromkeys(POST_INPUTS))
    results = drop_in(no_post)
    assert results[0] is given.residual
    assert_same_bits(results, seam("pre_delayed", given))

    results = drop_in(given, residual_out=given.residual)
    assert results[0] is given.residual
    assert_same_bits(results, wanted)
