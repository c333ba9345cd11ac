"""mhc_ops.nn: a V4.1 model made of it, against the same model written out in plain PyTorch."""

import copy
import pathlib
import re

import pytest
import torch
from cases import assert_same_bits
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import mhc_ops
from mhc_ops import reference
from mhc_ops.nn import DelayedSeam, SeamState, leave

HIDDEN_SIZE = 128
CONSTANTS = (1e-6, 1e-6, 1e-6, 2.0, 20)
HC_SHAPES = {"fn": (24, 4 * HIDDEN_SIZE), "base": (24,), "scale": (3,)}
GATE_TOLERANCE = 1e-6


class Layer(DelayedSeam):
    def __init__(self, **options):
        super().__init__(HIDDEN_SIZE, ("attn", "ffn"), **options)
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN_SIZE) for _ in range(2))
        self.attn, self.ffn = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(2))

    def forward(self, x, state=None):
        h, state = self.seam("attn", x, state, self.attn_norm.weight)
        h, state = self.seam("ffn", self.attn(h), state, self.ffn_norm.weight)
        return self.ffn(h), state


class Model(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN_SIZE)

    def forward(self, x):
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return leave(x, state, self.norm.weight)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def make(module, device="cpu"):
    """Random weights, of the size of a real model's."""
    for name, parameter in module.named_parameters():
        if name.endswith(("_base", "_scale", "norm.weight")):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    module = module.bfloat16().to(device)
    if isinstance(module, Model):
        module.layers[0].fold("attn")  # compiled code might sum in another order
    return module


def embeddings(tokens, device="cpu"):
    return torch.randn(tokens, HIDDEN_SIZE).bfloat16().to(device)


def checkpoint():
    """One layer's seams as a V4.1 checkpoint has them."""
    return {
        f"hc_{name}_{kind}": torch.randn(shape)
        for name in ("attn", "ffn")
        for kind, shape in HC_SHAPES.items()
    }


def written_out(model, x):
    """The model's whole forward with no module and no operator of this package."""
    sublayers = [
        (getattr(layer, name), getattr(layer, f"{name}_norm"), layer._weights(name))
        for layer in model.layers
        for name in ("attn", "ffn")
    ]
    streams, q = x.unsqueeze(1).expand(-1, 4, -1), None
    for sublayer, norm, (fn, scale, base) in sublayers:
        p, c, next_q = reference.gates(streams, fn, scale, base, *CONSTANTS)
        u = reference.collapse(streams, q)
        x = sublayer(reference.norm(u, norm.weight, 1e-6))
        streams, q = reference.post(streams, x, p, c), next_q
    return reference.norm(reference.collapse(streams, q), model.norm.weight, 1e-6)


def assert_close(got, wanted):
    """bf16 bit for bit, gates to 1e-6."""
    for a, b in zip(got, wanted, strict=True):
        if a.dtype == torch.bfloat16:
            assert_same_bits([a], [b])
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=GATE_TOLERANCE)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_model_is_what_the_formula_says(device, tokens):
    model, x = make(Model(), device), embeddings(tokens, device)
    got, wanted = model(x), written_out(model, x)
    # fold_fn and the kernels add up in another order, which moves a gate by 1e-7 and with it, now
    # and then, an element to the other side of a rounding boundary.
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    assert got.shape == (tokens, HIDDEN_SIZE)
    if tokens:
        assert (got == wanted).float().mean() > 0.95


def test_gates_act_one_sublayer_late():
    """hc_ffn of the first layer: nothing on its own input, all on the next seam."""
    model, x = make(Model()), embeddings(7)
    other = copy.deepcopy(model)
    other.layers[0].hc_ffn_base.add_(1)
    first, second = (m.layers[0] for m in (model, other))
    h, state = first.seam("attn", x, None)
    assert_same_bits([h], [x])  # the first seam collapses to the embedding
    y = first.attn(h)
    (h, state), (other_h, other_state) = (m.seam("ffn", y, state) for m in (first, second))
    assert_same_bits([h, state.residual], [other_h, other_state.residual])
    for mine, theirs in zip(state[1:4], other_state[1:4], strict=True):
        assert not torch.equal(mine, theirs)


def test_names_of_checkpoints():
    names = {name: p for name, p in Layer().named_parameters() if name.startswith("hc_")}
    assert set(names) == set(checkpoint())
    for name, parameter in names.items():
        assert parameter.shape == HC_SHAPES[name.split("_")[-1]]
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign):
    weights = checkpoint()
    layer = DelayedSeam(HIDDEN_SIZE)
    layer.load_state_dict(weights, strict=True, assign=assign)
    for name, value in weights.items():
        assert torch.equal(getattr(layer, name), value)
    assert list(layer.state_dict()) == list(weights)
    layers = nn.ModuleList([Layer()])
    missing = layers.load_state_dict({f"0.{k}": v for k, v in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    assert not any("hc_" in key for key in missing.missing_keys)
    del weights["hc_ffn_scale"]
    with pytest.raises(RuntimeError, match="hc_ffn_scale"):
        layer.load_state_dict(weights)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to"])
def test_weights_stay_float32(cast):
    layer = Layer()
    layer.load_state_dict(checkpoint(), strict=False)
    layer.fold("attn")
    before = {k: v.clone() for k, v in layer.named_parameters() if k.startswith("hc_")}
    layer = layer.to(torch.bfloat16) if cast == "to" else getattr(layer, cast)()
    assert layer.attn.weight.dtype != torch.float32
    assert layer.hc_attn_folded.dtype == torch.float32
    for name, value in before.items():
        assert_same_bits([getattr(layer, name)], [value])


def test_device_moves_while_the_dtype_stays(device):
    layer = Layer().to("meta", torch.bfloat16)
    assert layer.hc_attn_fn.is_meta
    layer = layer.to_empty(device=device)
    assert layer.hc_attn_fn.device.type == device
    assert {p.dtype for n, p in layer.named_parameters() if n.startswith("hc_")} == {torch.float32}
    assert layer.attn.weight.dtype == torch.bfloat16
    assert Layer(device="meta").hc_ffn_base.is_meta
    moved = Layer().to(device, torch.bfloat16)
    assert moved.hc_ffn_fn.device.type == device
    assert moved.hc_ffn_fn.dtype == torch.float32


def test_folding_once(device):
    model, x = make(Model(), device), embeddings(7, device)
    entry = model.layers[0]
    entry.hc_attn_folded = None
    wanted = model(x)
    entry.fold("attn")
    assert "hc_attn_folded" not in entry.state_dict()
    assert_same_bits([model(x)], [wanted])
    weights = {k: v.to(device) for k, v in checkpoint().items()}
    entry.load_state_dict(weights, strict=False)  # folds again
    got = model(x)
    entry.hc_attn_folded = None
    assert_same_bits([got], [model(x)])
    assert not torch.equal(got, wanted)


def test_streams_edited_between_post_and_pre(device):
    """As an Engram layer does: with nothing edited it is the fused seam."""
    layer, x = make(Layer(), device), embeddings(7, device)
    y, state = layer(x)
    h, wanted = layer.seam("attn", y, state, layer.attn_norm.weight)
    streams = mhc_ops.post(state.residual, y, state.post_mix, state.comb_mix)
    edited = state._replace(residual=streams)
    got_h, got = layer.seam("attn", None, edited, layer.attn_norm.weight)
    assert_close((got_h, *got[:4]), (h, *wanted[:4]))


def test_aux(device):
    layer, x = make(Layer(), device), embeddings(7, device)
    y, state = layer(x)
    h, wanted = layer.seam("attn", y, state)
    got_h, got, aux = layer.seam("attn", y, state, aux=True)
    assert_close((got_h, *got[:4]), (h, *wanted[:4]))
    assert_same_bits([aux], [reference.mean(got.residual)])


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_overlapped_is_the_same(device, tokens):
    model, x = make(Model(overlap=True), device), embeddings(tokens, device)
    fused = copy.deepcopy(model)
    for layer in fused.layers:
        layer.overlap = False
    y, state = model.layers[0](x)
    other_y, other = fused.layers[0](x)
    assert (state.ready is not None) == (device == "cuda")
    state = state.joined()
    assert state.ready is None
    assert_close((y, *state[:4]), (other_y, *other[:4]))
    torch.testing.assert_close(model(x), fused(x), rtol=0.02, atol=0.02)


def test_not_overlapped_unless_asked(device):
    _, state = make(Layer(), device)(embeddings(1, device))
    assert state.ready is None


@pytest.mark.gpu
def test_overlapped_under_memory_pressure():
    """Every step's temporaries are freed at once: reuse before the side stream is done shows."""
    model = make(Model(layers=4, overlap=True), "cuda")
    inputs = [embeddings(tokens, "cuda") for tokens in (1, 64, 192, 7)]
    wanted = [model(x) for x in inputs]
    for step in range(400):
        x = inputs[step % 4]
        got = model(x)
        torch.empty_like(got).fill_(torch.nan)
        assert_same_bits([got], [wanted[step % 4]])


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_captured(overlap):
    model = make(Model(layers=4, overlap=overlap), "cuda")
    x = embeddings(64, "cuda")
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model(x)
    for _ in range(20):
        x.copy_(embeddings(64))
        hidden.fill_(torch.nan)
        graph.replay()
        assert_same_bits([hidden], [model(x)])


@pytest.mark.gpu
def test_a_state_dropped_without_a_join():
    """The side stream still writes and reads its memory."""
    layer, x = make(Layer(overlap=True), "cuda"), embeddings(64, "cuda")
    wanted = layer(x)[0]
    for _ in range(200):
        layer(x)
        assert_same_bits([layer(x)[0]], [wanted])


def test_state_of_another_batch(device):
    layer = make(Layer(), device)
    _, state = layer(embeddings(7, device))
    for overlap in (False, True):
        layer.overlap = overlap
        message = rf"sublayer_out must have shape \[T, H\] = \[7, {HIDDEN_SIZE}\], got \[3, "
        with pytest.raises(ValueError, match=message):
            layer.seam("attn", embeddings(3, device), state)
    with pytest.raises(ValueError, match="sublayer_out must have shape"):
        leave(embeddings(3, device), state)


def test_what_is_missing():
    layer = make(Layer())
    y, state = layer(embeddings(7))
    for x, given, aux, message in (
        (None, None, False, "x is missing"),
        (y, None, True, "aux needs both"),
        (None, state, True, "aux needs both"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.seam("attn", x, given, aux=aux)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("overlap", [False, True])
def test_compiled(device, overlap):
    """Two graphs for every T, nothing but fused seams in them, the bits of eager."""
    model = make(Model(overlap=overlap), device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    eager = copy.deepcopy(model)
    for layer in eager.layers:
        layer.overlap = False
    for tokens in (1, 2, 7, 64):
        x = embeddings(tokens, device)
        assert_same_bits([compiled(x)], [eager(x)])
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.usefixtures("fresh_compiler")
def test_state_through_compiled_code(device):
    layer, x = make(Layer(), device), embeddings(7, device)
    _, state = layer(x)
    compiled = torch.compile(layer, fullgraph=True)
    y, got = compiled(x, state)
    assert isinstance(got, SeamState)
    wanted_y, wanted = layer(x, state)
    assert_same_bits((y, *got[:4]), (wanted_y, *wanted[:4]))


def test_exported_with_its_state(device, tmp_path):
    layer, x = make(Layer(), device), embeddings(7, device)
    _, state = layer(x)
    tokens = torch.export.Dim("T", min=1)
    by_tokens = {0: tokens}
    shapes = {"x": by_tokens, "state": SeamState(*(by_tokens,) * 4, None)}
    program = torch.export.export(layer, (x, state), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for count in (1, 64):
        x = embeddings(count, device)
        _, state = layer(x)
        got, wanted = (pytree.tree_leaves(f(x, state))[:5] for f in (loaded, layer))
        assert_same_bits(got, wanted)


def test_readme_model_runs():
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Layer" in c)
    assert len(code.splitlines()) <= 25
    names = {}
    exec(code, names)
    assert names["hidden"].shape == (7, 512)
    assert names["hidden"].isfinite().all()
    assert names["layers"][0].hc_attn_fn.dtype == torch.float32
