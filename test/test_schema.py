"""The schemas that are registered are the ones that are written down, and importing is cheap."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from cases import operator
from expecttest import assert_expected_inline

import mhc_ops
from mhc_ops import ops, schemas
from mhc_ops.ops import Given

OPERATORS = tuple(schemas.read_schemas())


def schema_arguments(name):
    return operator(name)._schema.arguments


def test_schemas():
    assert_expected_inline(
        "\n".join(str(operator(name)._schema) for name in OPERATORS),
        """\
mhc::post_pre_delayed(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor residual_out, Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix)
mhc::post_pre_delayed_(Tensor(a!) residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix)
mhc::post_pre_delayed_out(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07, *, Tensor(a!) residual_out) -> (Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix)
mhc::pre_delayed(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix)
mhc::post_pre_delayed_aux(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor residual_out, Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix, Tensor aux)
mhc::post_pre_delayed_quant(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? pre_mix, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor norm_weight, float norm_eps=9.9999999999999995e-07, bool ue8m0=True) -> (Tensor residual_out, Tensor post_mix, Tensor comb_mix, Tensor layer_input_q, Tensor layer_input_scale, Tensor next_pre_mix)
mhc::expand_pre_delayed(Tensor x, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor residual, Tensor post_mix, Tensor comb_mix, Tensor layer_input, Tensor next_pre_mix)
mhc::post(Tensor residual, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix) -> Tensor residual_out
mhc::post_collapse(Tensor residual, Tensor sublayer_out, Tensor post_layer_mix, Tensor comb_res_mix, Tensor? pre_mix, Tensor? norm_weight=None, float norm_eps=9.9999999999999995e-07) -> (Tensor residual_out, Tensor layer_input)
mhc::gates(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat) -> (Tensor post_mix, Tensor comb_mix, Tensor next_pre_mix)
mhc::quantise(Tensor x, bool ue8m0=True) -> (Tensor layer_input_q, Tensor layer_input_scale)""",
    )


def test_file_is_read_to_the_end():
    read = schemas.read_schemas()
    lines = schemas.FILE.read_text().splitlines()
    assert len(read) == sum(line.startswith("[") for line in lines)
    for name, (schema, _) in read.items():
        # Parsed by torch and printed again, so that spelling (1e-06) does not matter.
        assert str(torch._C.parse_schema(f"mhc::{schema}")) == str(operator(name)._schema)


def test_nothing_else_is_registered():
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("mhc::")}
    assert registered == {f"mhc::{name}" for name in OPERATORS}


@pytest.mark.parametrize("name", OPERATORS)
def test_one_overload(name):
    assert getattr(torch.ops.mhc, name).overloads() == ["default"]


@pytest.mark.parametrize("name", OPERATORS)
def test_tags(name):
    assert torch.Tag.pt2_compliant_tag in operator(name).tags
    if hasattr(torch.Tag, "needs_exact_strides"):
        assert torch.Tag.needs_exact_strides in operator(name).tags


@pytest.mark.parametrize("name", OPERATORS)
def test_every_key_has_a_kernel(name):
    for key in ("CPU", "CUDA", "Meta", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mhc::{name}", key), key


@pytest.mark.parametrize("name", OPERATORS)
def test_only_the_streams_are_written(name):
    written = {a.name for a in schema_arguments(name) if a.alias_info and a.alias_info.is_write}
    in_place = {"post_pre_delayed_": {"residual"}, "post_pre_delayed_out": {"residual_out"}}
    assert written == in_place.get(name, set())
    assert not any(r.alias_info for r in operator(name)._schema.returns)


def test_given_follows_the_schema():
    arguments = schema_arguments("post_pre_delayed")
    assert list(Given._fields) == [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    assert Given._field_defaults == defaults


@pytest.mark.parametrize("name", OPERATORS)
def test_function_follows_the_schema(name):
    parameters = inspect.signature(getattr(mhc_ops, name)).parameters.values()
    for parameter, argument in zip(parameters, schema_arguments(name), strict=True):
        assert parameter.name == argument.name
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        else:
            assert parameter.default is parameter.empty


@pytest.mark.parametrize("name", OPERATORS)
def test_body_takes_what_the_schema_says(name):
    """The fake and the real kernels are one body: it must bind every call of the schema."""
    arguments = schema_arguments(name)
    signature = inspect.signature(getattr(ops, name))
    positional = [a.name for a in arguments if not a.kwarg_only]
    keywords = {a.name: a.name for a in arguments if a.kwarg_only}
    signature.bind("run", *positional, **keywords)
    signature.bind("run", **{a.name: a.name for a in arguments})
    required = [a.name for a in arguments if not a.has_default_value() and not a.kwarg_only]
    signature.bind("run", *required, **keywords)


def test_drop_in_has_the_argument_order_of_serving_engines():
    assert_expected_inline(
        str(inspect.signature(mhc_ops.mhc_post_pre_delayed)).replace("torch.Tensor", "Tensor"),
        """(residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_pre_eps: float, hc_sinkhorn_eps: float, hc_post_mult_value: float, sinkhorn_repeat: int, pre_mix: Tensor | None, sublayer_out: Tensor | None = None, post_layer_mix: Tensor | None = None, comb_res_mix: Tensor | None = None, norm_weight: Tensor | None = None, norm_eps: float = 1e-06, *, residual_out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]""",
    )


def test_everything_public_exists():
    for name in mhc_ops.__all__:
        assert callable(getattr(mhc_ops, name))
    assert set(OPERATORS) < set(mhc_ops.__all__)


IMPORT = """
import sys, time
import torch
had_triton = "triton" in sys.modules
begin = time.perf_counter()
import mhc_ops
took = time.perf_counter() - begin
assert had_triton or "triton" not in sys.modules, "imports triton"
assert not torch.cuda.is_initialized(), "initialises CUDA"
mhc_ops.post_pre_delayed, torch.ops.mhc.post_pre_delayed.default
print(took)
"""


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_import_is_cheap_and_touches_nothing(tmp_path):
    # Tried again, since other processes share the cores.
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert any(float(run_python(IMPORT, **cache)) < 0.3 for _ in range(3))
    assert not list(tmp_path.iterdir())


RUN_ALL = """
import sys
sys.modules["triton"] = None  # an import of it fails
import model_cases
import mhc_ops
from cases import OPERATORS, operator, seam
from mhc_ops.testing import assert_accurate, make_inputs
given = make_inputs(3, 128)
for name in OPERATORS:
    assert len(seam(name, given)) == 5
for name in model_cases.MODEL_OPERATORS:
    for function in (operator(name), getattr(mhc_ops, name)):
        made = model_cases.results(name, function, given)
        assert_accurate(*model_cases.judged(name, given, made))
assert mhc_ops.warmup(128, 8, device="cpu") == 0
print("ok")
"""


def test_runs_under_ci_and_without_kernels():
    """With CI set, torch makes an output that aliases an input an error instead of a warning."""
    assert run_python(RUN_ALL, CI="1").strip() == "ok"
