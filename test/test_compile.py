"""torch.compile and export: the same bits as eager, few graphs, nothing lost."""

import pytest
import torch
from cases import OPERATORS, arguments, assert_same_bits, call, map_tensors, operator, seam
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mhc_ops
from mhc_ops.testing import make_inputs

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FUNCTIONS = (*OPERATORS, "mhc_post_pre_delayed")
BACKENDS = ("aot_eager", "inductor")
TOKENS = (1, 2, 7, 64, 65, 513)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def compiled(name, **options):
    """A public function, compiled whole. A graph break is an error."""
    function = getattr(mhc_ops, name)
    return torch.compile(lambda *a, **k: function(*a, **k), fullgraph=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_graphs_for_every_T(device, seed, name, backend):
    function = compiled(name, backend=backend, dynamic=True)
    for tokens in TOKENS:
        given = make_inputs(tokens, 128, seed=seed + tokens, device=device)
        wanted = call(getattr(mhc_ops, name), *arguments(name, given))
        assert_same_bits(call(function, *arguments(name, given)), wanted)
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


def test_drop_in_variants(device, seed):
    given = make_inputs(7, 128, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)

    def in_place(residual, *rest):
        residual = residual.clone()
        return mhc_ops.mhc_post_pre_delayed(residual, *rest, residual_out=residual)

    def into(residual, *rest):
        out = torch.empty_like(residual)
        return mhc_ops.mhc_post_pre_delayed(residual, *rest, residual_out=out)

    def no_post(*args):
        return mhc_ops.mhc_post_pre_delayed(*args[:10], norm_weight=args[13], norm_eps=args[14])

    for function in (in_place, into):
        assert_same_bits(torch.compile(function, fullgraph=True)(*given), wanted)
    results = torch.compile(no_post, fullgraph=True)(*given)
    assert_same_bits(results, seam("pre_delayed", given))


def test_one_node(seed):
    """The seam is opaque: one node in the graph, and no other operator."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    given = make_inputs(7, 128, seed=seed)
    compiled("post_pre_delayed", backend=backend)(*given)
    (graph,) = graphs
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if isinstance(t, torch._ops.OpOverload)] == [
        operator("post_pre_delayed")
    ]


def test_no_tokens(device):
    given = make_inputs(0, 128, device=device)
    for name in FUNCTIONS:
        results = call(compiled(name), *arguments(name, given))
        assert [r.shape[0] for r in results] == [0] * 5


def test_fake_kernels_keep_T_symbolic():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    per_token = ("residual", "pre_mix", "sublayer_out", "post_layer_mix", "comb_res_mix")

    def fake(name, tensor):
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if name in per_token:
            sizes[0] = DimDynamic.DUCK
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))

    given = make_inputs(7, 128)
    tensors = {k: v for k, v in given._asdict().items() if isinstance(v, torch.Tensor)}
    given = given._replace(**{k: fake(k, v) for k, v in tensors.items()})
    tokens = given.residual.shape[0]
    assert isinstance(tokens, torch.SymInt)
    with mode:
        for name in OPERATORS:
            for result in seam(name, given):
                assert isinstance(result.shape[0], torch.SymInt)
                assert result.shape[0].node.expr == tokens.node.expr


@pytest.mark.parametrize("name", ["post_pre_delayed", "pre_delayed"])
def test_export_with_dynamic_T(device, seed, tmp_path, name):
    class Seam(torch.nn.Module):
        def forward(self, *args):
            return operator(name)(*args)

    args, _ = arguments(name, make_inputs(5, 128, seed=seed, device=device))
    tokens = torch.export.Dim("T", min=1)
    dynamic = tuple(
        {0: tokens} if isinstance(a, torch.Tensor) and a.shape[0] == 5 else None for a in args
    )
    program = torch.export.export(Seam(), tuple(args), dynamic_shapes=(dynamic,))
    torch.export.save(program, tmp_path / "seam.pt2")
    loaded = torch.export.load(tmp_path / "seam.pt2").module()
    for tokens in (1, 300):
        given = make_inputs(tokens, 128, seed=seed + tokens, device=device)
        args, _ = arguments(name, given)
        assert_same_bits(loaded(*args), operator(name)(*args))


def generated(function, *args):
    """(results, the body that inductor wrote to call the kernels)."""
    results, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    body = code[code.index("def call") :]
    for helper in ("def get_args", "def benchmark_compiled_module"):
        body = body.split(helper)[0]
    return results, body


def allocation_of_streams(device):
    return f"empty_strided_{device}((7, 4, 256), (1024, 256, 1), torch.bfloat16)"


def test_in_place_neither_clones_nor_copies_the_streams(device, seed):
    given = make_inputs(7, 256, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)
    residual = given.residual.clone()
    results, body = generated(mhc_ops.post_pre_delayed_, residual, *given[1:])
    assert_same_bits((residual, *results), wanted)
    # The input itself, no buffer in between.
    assert "torch.ops.mhc.post_pre_delayed_.default(arg0_1" in body
    assert allocation_of_streams(device) not in body
    assert ".copy_(" not in body


def test_in_place_after_a_producer_needs_one_buffer(device, seed):
    """The streams come out of the same graph, as inside a model: still no copy of them."""
    given = make_inputs(7, 256, seed=seed, device=device)

    def step(residual, *rest):
        streams = residual * 2
        return streams, *mhc_ops.post_pre_delayed_(streams, *rest)

    results, body = generated(step, *given)
    assert_same_bits(results, step(*given))
    assert body.count(allocation_of_streams(device)) == 1
    assert ".copy_(" not in body


@pytest.mark.parametrize("name", ["post_pre_delayed_", "post_pre_delayed_out"])
def test_old_value_is_kept_for_who_reads_it_later(device, seed, name):
    """Functionalisation must not let a reader of the old streams see the new ones."""
    given = make_inputs(7, 128, seed=seed, device=device)

    def step(*args):
        residual = args[0].clone()
        before = residual * 3
        kwargs = {"residual_out": residual} if name.endswith("_out") else {}
        source = args[0] if name.endswith("_out") else residual
        rest = operator(name)(source, *args[1:], **kwargs)
        return before, residual * 3, *rest

    assert_same_bits(torch.compile(step, fullgraph=True)(*given), step(*given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_seams_in_place_in_a_row(device, seed, backend):
    given = make_inputs(7, 128, seed=seed, device=device)

    def layers(residual, *rest):
        residual = residual.clone()
        for _ in range(2):
            post, comb, layer_input, pre = mhc_ops.post_pre_delayed_(residual, *rest)
            rest = (*rest[:8], pre, layer_input, post, comb, *rest[12:])
        return residual, post, comb, layer_input, pre

    function = torch.compile(layers, fullgraph=True, backend=backend)
    assert_same_bits(function(*given), layers(*given))


PRODUCERS = {
    "transposed streams made contiguous": ("residual", lambda t: t.mT.contiguous().mT.contiguous()),
    "padded rows made contiguous": (
        "sublayer_out",
        lambda t: torch.nn.functional.pad(t, (0, 8))[:, :-8].contiguous(),
    ),
    "transposed comb": ("comb_res_mix", lambda t: t.mT.contiguous().mT),
    "part of a wider gate": ("pre_mix", lambda t: torch.cat((t, t), dim=1)[:, 4:]),
    "expanded scale": ("hc_scale", lambda t: (t[:1] * 1).expand(3)),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_producers_of_other_strides(device, seed, producer):
    """What the operator takes in eager it takes from a compiled producer, with the same bits."""
    argument, produce = PRODUCERS[producer]
    position = type(make_inputs(0, 128))._fields.index(argument)
    given = make_inputs(7, 128, seed=seed, device=device)

    def step(*args):
        args = list(args)
        args[position] = produce(args[position])
        return mhc_ops.post_pre_delayed(*args)

    assert_same_bits(torch.compile(step, fullgraph=True)(*given), step(*given))


BAD_PRODUCERS = {
    "transposed streams": ("residual", lambda t: t.mT.contiguous().mT),
    "padded rows": ("sublayer_out", lambda t: torch.nn.functional.pad(t, (0, 8))[:, :-8]),
}


@pytest.mark.parametrize("producer", BAD_PRODUCERS)
def test_producers_of_streams_with_gaps(device, producer):
    """The compiler must not repair what eager refuses: it may also fail to."""
    argument, produce = BAD_PRODUCERS[producer]
    given = make_inputs(7, 128, device=device)

    def step(tensor):
        return mhc_ops.post_pre_delayed(*given._replace(**{argument: produce(tensor)}))

    tensor = getattr(given, argument)
    with pytest.raises(ValueError, match=f"{argument} must be contiguous"):
        step(tensor)
    with pytest.raises(Exception, match=f"{argument} must be contiguous"):
        torch.compile(step, fullgraph=True)(tensor)


def test_residual_out_as_another_view_of_residual(device, seed):
    """In place through the out operator: allowed in eager, so compiled it must not differ."""
    given = make_inputs(7, 128, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)

    def step(residual, *rest):
        residual = residual.clone()
        out = residual.view(residual.shape)
        rest = mhc_ops.post_pre_delayed_out(residual, *rest, residual_out=out)
        return residual, *rest

    assert_same_bits(torch.compile(step, fullgraph=True)(*given), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_residual_out_as_an_input_that_is_residual(device, seed, backend):
    given = make_inputs(7, 128, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)

    def step(residual, out, *rest):
        return mhc_ops.mhc_post_pre_delayed(residual, *rest, residual_out=out)

    function = torch.compile(step, fullgraph=True, backend=backend)
    for view in (lambda t: t, lambda t: t.view(t.shape)):
        residual = given.residual.clone()
        results = function(residual, view(residual), *given[1:])
        assert_same_bits((residual, *results[1:]), wanted)


def test_autocast(device, seed):
    given = make_inputs(7, 128, seed=seed, device=device)

    def step(*args):
        with torch.autocast(device, torch.bfloat16):
            return mhc_ops.post_pre_delayed(*args)

    wanted = seam("post_pre_delayed", given)
    assert_same_bits(torch.compile(step, fullgraph=True)(*given), wanted)
    with torch.autocast(device, torch.bfloat16):
        assert_same_bits(compiled("post_pre_delayed")(*given), wanted)


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs_that_require_grad(device, name):
    given = map_tensors(torch.Tensor.requires_grad_, make_inputs(7, 128, device=device))
    args, kwargs = arguments(name, given)
    function = compiled(name, backend="aot_eager")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference only"):
        function(*args, **kwargs)
    with torch.inference_mode():
        assert len(call(function, args, kwargs)) == 5


def test_bad_input_has_the_same_error(device):
    given = make_inputs(7, 128, device=device)
    given = given._replace(fn=given.fn[:23])
    with pytest.raises(Exception, match=r"fn must have shape \[24, K\] = \[24, 512\], got \[23"):
        compiled("post_pre_delayed", backend="aot_eager")(*given)
