"""The operators around the whole seam: what each returns, and that together they are the seam."""

import meta_cases
import pytest
import torch
from cases import OPERATORS, assert_same_bits, label, map_tensors, operator
from expecttest import assert_expected_inline
from model_cases import GATES, MODEL_OPERATORS, OPTIONAL_OF, arguments, judged, names, results
from test_checks import FAULTS, error_of, on_meta
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_ops
from mhc_ops.testing import assert_accurate, make_inputs

T, H = 5, 256
optional_of = pytest.mark.parametrize(
    ("name", "optional"), OPTIONAL_OF, ids=lambda v: v if isinstance(v, str) else label(v)
)
every_operator = pytest.mark.parametrize("name", MODEL_OPERATORS)


def run(name, given):
    return results(name, operator(name), given)


def given_of(made):
    return [value for value in made if value is not None]


@optional_of
@pytest.mark.parametrize("tokens", [1, 65])
def test_accuracy(device, seed, name, optional, tokens):
    given = make_inputs(tokens, 384, seed=seed, device=device, hc_scale=10, **optional)
    assert_accurate(*judged(name, given, run(name, given)))


def test_expanded_streams_are_copies(device, seed):
    given = make_inputs(7, 256, seed=seed, device=device)
    made = run("expand_pre_delayed", given)
    assert torch.equal(made.residual_out, given.sublayer_out.unsqueeze(1).expand(7, 4, 256))
    without_norm = run("expand_pre_delayed", given._replace(norm_weight=None))
    assert torch.equal(without_norm.layer_input, given.sublayer_out)


def test_aux_is_the_mean_in_fp32(device, seed):
    """Exact to the bit: the four terms are summed in order and a quarter loses nothing."""
    made = run("post_pre_delayed_aux", make_inputs(65, 384, seed=seed, device=device))
    r0, r1, r2, r3 = made.residual_out.float().unbind(1)
    assert torch.equal(made.aux, ((r0 + r1 + r2 + r3) / 4).bfloat16())


# Tokens in every row of the configurations; hidden sizes narrower and wider than a program.
TOKENS = (1, 17, 97, 400, 2100, pytest.param(8200, marks=pytest.mark.gpu))


@pytest.mark.parametrize("optional", [o for n, o in OPTIONAL_OF if n == "post_collapse"], ids=label)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_parts_are_the_whole(device, seed, tokens, optional):
    """The streams and layer_input bit for bit, the gates to 1e-6."""
    hidden_size = 5120 if device == "cuda" else 128
    given = make_inputs(tokens, hidden_size, seed=seed, device=device, **optional)
    whole = run("post_pre_delayed_aux", given)
    streams = run("post", given).residual_out
    collapse = run("post_collapse", given)
    mixed = given._replace(residual=streams)
    rest = results("pre_delayed", operator("pre_delayed"), mixed)
    fused = results("post_pre_delayed", operator("post_pre_delayed"), given)
    for other in (streams, collapse.residual_out, fused.residual_out):
        assert_same_bits((other,), (whole.residual_out,))
    for other in (collapse, rest, fused):
        assert_same_bits((other.layer_input,), (whole.layer_input,))
    for other in (run("gates", mixed), rest, fused):
        for gate in GATES:
            got, wanted = getattr(other, gate), getattr(whole, gate)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 97])
def test_entry_is_a_seam_of_copies(device, seed, tokens):
    given = make_inputs(tokens, 640, seed=seed, device=device, pre_mix=False)
    entry = run("expand_pre_delayed", given)
    copies = given._replace(residual=entry.residual_out)
    seam = results("pre_delayed", operator("pre_delayed"), copies)
    assert_same_bits((entry.layer_input,), (seam.layer_input,))
    for gate in GATES:
        got, wanted = getattr(entry, gate), getattr(seam, gate)
        torch.testing.assert_close(got, wanted, rtol=0, atol=5e-6)


def test_fold_fn():
    fn = make_inputs(1, H).fn
    folded = mhc_ops.fold_fn(fn)
    assert folded.dtype == torch.float32
    assert folded.is_contiguous()
    exact = fn.double().view(24, 4, H).sum(1)
    torch.testing.assert_close(folded.double(), exact, rtol=0, atol=1e-7)
    for bad in (fn[:23], fn[:, :-1], fn[None]):
        with pytest.raises(ValueError, match=r"fold_fn: fn must have shape \[24, 4 \* H\], got"):
            mhc_ops.fold_fn(bad)
    with pytest.raises(TypeError, match="fold_fn: fn must have dtype float32, got bfloat16"):
        mhc_ops.fold_fn(fn.bfloat16())


@every_operator
def test_outputs_are_fresh_and_contiguous(device, name):
    inputs = arguments(name, make_inputs(7, 256, device=device))
    found = operator(name)(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    tensors = [v for v in (*found, *inputs) if isinstance(v, torch.Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(storages)) == len(storages)
    assert all(r.is_contiguous() and r.storage_offset() == 0 for r in found)


@every_operator
def test_no_tokens(device, name):
    made = run(name, make_inputs(0, H, device=device))
    shapes = ((0, 4, H), (0, 4, 1), (0, 4, 4), (0, H), (0, 4), (0, H), (0, H // 32))
    for got, shape in zip(made, shapes, strict=True):
        assert got is None or got.shape == shape


@every_operator
def test_autocast_changes_nothing(device, seed, name):
    given = make_inputs(7, H, seed=seed, device=device)
    wanted = run(name, given)
    with torch.autocast(device, torch.bfloat16):
        assert_same_bits(given_of(run(name, given)), given_of(wanted))


# What is wrong with x and with the folded fn; everything else is in FAULTS.
X_FAULTS = {
    "rank": lambda t: t[:, None],
    "no columns": lambda t: t[:, :0],
    "dtype": lambda t: t.float(),
    "strides": lambda t: t.t().contiguous().t(),
}
EXPAND_FAULTS = {"x": X_FAULTS, "fn": {**FAULTS["fn"], "not folded": lambda t: t.repeat(1, 4)}}
CASES = [
    (name, argument, fault)
    for name in MODEL_OPERATORS
    for argument in names(name)
    for fault in (
        EXPAND_FAULTS.get(argument) if "x" in names(name) and argument in EXPAND_FAULTS
        else FAULTS.get(argument, ())
    )
]  # fmt: skip


def bad_call(name, argument, fault, convert=lambda t: t):
    faults = {**FAULTS, **EXPAND_FAULTS} if "x" in names(name) else FAULTS
    named = dict(zip(names(name), arguments(name, make_inputs(T, H)), strict=True))
    named[argument] = faults[argument][fault](named[argument])
    return [convert(v) if isinstance(v, torch.Tensor) else v for v in named.values()]


def test_messages_of_the_entry():
    lines = []
    for argument, faults in EXPAND_FAULTS.items():
        for fault in faults:
            args = bad_call("expand_pre_delayed", argument, fault)
            kind, text = error_of(operator("expand_pre_delayed"), args, {})
            lines.append(f"{argument}, {fault}: {kind.__name__}\n  {text}")
    assert_expected_inline(
        "\n".join(lines),
        """\
x, rank: ValueError
  mhc::expand_pre_delayed: x must have shape [T, H], got [5, 1, 256]
x, no columns: ValueError
  mhc::expand_pre_delayed: x must have shape [T, H], got [5, 0]
x, dtype: TypeError
  mhc::expand_pre_delayed: x must have dtype bfloat16, got float32
x, strides: ValueError
  mhc::expand_pre_delayed: x must be contiguous, got strides [1, 5] for shape [5, 256]
fn, rows: ValueError
  mhc::expand_pre_delayed: fn must have shape [24, H] = [24, 256], got [23, 256]
fn, columns: ValueError
  mhc::expand_pre_delayed: fn must have shape [24, H] = [24, 256], got [24, 252]
fn, dtype: TypeError
  mhc::expand_pre_delayed: fn must have dtype float32, got bfloat16
fn, strides: ValueError
  mhc::expand_pre_delayed: fn must be contiguous, got strides [1, 24] for shape [24, 256]
fn, not folded: ValueError
  mhc::expand_pre_delayed: fn must have shape [24, H] = [24, 256], got [24, 1024]""",
    )


@pytest.mark.parametrize(("name", "argument", "fault"), CASES)
def test_same_error_everywhere(name, argument, fault):
    args = bad_call(name, argument, fault)
    kind, text = error_of(operator(name), args, {})
    assert kind is (TypeError if fault == "dtype" else ValueError)
    assert text.startswith(f"mhc::{name}: {argument}")
    assert error_of(getattr(mhc_ops, name), args, {}) == (kind, text)
    assert error_of(operator(name), bad_call(name, argument, fault, on_meta), {}) == (kind, text)
    with FakeTensorMode() as mode:
        fake = bad_call(name, argument, fault, mode.from_tensor)
        assert error_of(operator(name), fake, {}) == (kind, text)


@pytest.mark.parametrize("where", ["device", "meta"])
@pytest.mark.parametrize(("name", "argument"), meta_cases.REQUIRED)
def test_what_is_missing(device, name, argument, where):
    """None for a tensor that is not optional: PyTorch hands it on, and without it an operator
    would be another one."""
    where = device if where == "device" else where
    values = meta_cases.example(name)
    values = {k: v.to(where) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    kind, text = error_of(operator(name), (), {**values, argument: None})
    assert (kind, text) == (ValueError, f"mhc::{name}: {argument} is missing")


@every_operator
def test_state_of_another_batch_size(name):
    """Every tensor that goes by token must have the T of the first."""
    _, *others = names(name)
    few, many = make_inputs(T, H), make_inputs(T + 1, H)
    for argument in others:
        values = dict(zip(names(name), arguments(name, few), strict=True))
        other = dict(zip(names(name), arguments(name, many), strict=True))[argument]
        if isinstance(other, torch.Tensor) and other.shape != values[argument].shape:
            values[argument] = other
            with pytest.raises(ValueError, match=f"mhc::{name}: {argument} must have shape"):
                operator(name)(*values.values())


@every_operator
def test_hidden_size_without_gpu_support(name):
    with FakeTensorMode():
        given = map_tensors(lambda t: torch.empty_like(t, device="cuda"), make_inputs(T, 192))
        with pytest.raises(ValueError, match="H must be a multiple of 128 on a GPU, got H = 192"):
            operator(name)(*arguments(name, given))


@every_operator
def test_tensors_on_different_devices(name):
    first, *others = names(name)
    for argument in others:
        values = dict(zip(names(name), arguments(name, make_inputs(T, H)), strict=True))
        if isinstance(values[argument], torch.Tensor):
            values[argument] = values[argument].to("meta")
            wanted = f"{argument} must be on the device of {first}, cpu, got meta"
            with pytest.raises(ValueError, match=wanted):
                operator(name)(*values.values())


@every_operator
def test_inputs_that_require_grad(device, name):
    message = f"mhc::{name} is inference only and an input requires grad"
    for position in range(len(names(name))):
        args = arguments(name, make_inputs(T, H, device=device, sinkhorn_repeat=2))
        if not isinstance(args[position], torch.Tensor):
            continue
        args[position].requires_grad_()
        with pytest.raises(RuntimeError, match=message):
            operator(name)(*args)
        with torch.no_grad():
            found = operator(name)(*args)
        found = found if isinstance(found, tuple) else (found,)
        assert not any(r.requires_grad for r in found)


@optional_of
def test_opcheck(device, name, optional):
    given = make_inputs(3, 128, device=device, sinkhorn_repeat=2, **optional)
    torch.library.opcheck(operator(name), arguments(name, given))


@pytest.mark.parametrize("tokens", [0, 1])
@every_operator
def test_opcheck_of_few_tokens(device, name, tokens):
    given = make_inputs(tokens, 128, device=device, sinkhorn_repeat=2)
    torch.library.opcheck(operator(name), arguments(name, given))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_operator
def test_two_graphs_for_every_T(device, seed, name, backend):
    function = getattr(mhc_ops, name)
    compiled = torch.compile(
        lambda *args: function(*args), fullgraph=True, dynamic=True, backend=backend
    )
    for tokens in (1, 2, 7, 64, 65, 513):
        given = make_inputs(tokens, 128, seed=seed + tokens, device=device)
        wanted = results(name, function, given)
        assert_same_bits(given_of(results(name, compiled, given)), given_of(wanted))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.usefixtures("fresh_compiler")
@every_operator
def test_export_with_dynamic_T(device, seed, name):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return operator(name)(*args)

    args = arguments(name, make_inputs(5, 128, seed=seed, device=device))
    tokens = torch.export.Dim("T", min=1)
    dynamic = tuple(
        {0: tokens} if isinstance(a, torch.Tensor) and a.shape[0] == 5 else None for a in args
    )
    program = torch.export.export(Module(), tuple(args), dynamic_shapes=(dynamic,)).module()
    for tokens in (1, 300):
        given = make_inputs(tokens, 128, seed=seed + tokens, device=device)
        got = given_of(results(name, program, given))
        assert_same_bits(got, given_of(run(name, given)))


def test_every_operator_is_tested():
    from mhc_ops import registration

    assert set(registration.read_schemas()) == {*OPERATORS, *MODEL_OPERATORS}
