"""Scales in the layouts of GEMMs, and mhc_ops.nn with quantised inputs of its sublayers."""

import copy

import pytest
import torch
from cases import assert_same_bits
from quant_cases import SCALES, assert_same
from test_nn import HIDDEN_SIZE, Layer, embeddings, make
from torch._dynamo.utils import counters

import mhc_ops
from mhc_ops.nn import DelayedSeam, leave

SHAPES = [(0, 4), (1, 1), (3, 4), (4, 5), (130, 40), (257, 7)]


def random_scale(tokens, groups, device="cpu"):
    codes = torch.randint(1, 256, (tokens, groups), dtype=torch.uint8)
    return codes.to(device).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("shape", SHAPES)
def test_pack_scale(device, shape):
    scale = random_scale(*shape, device)
    tokens, groups = shape
    packed = mhc_ops.pack_scale(scale)
    words, stride = (groups + 3) // 4, (tokens + 3) // 4 * 4
    assert packed.dtype == torch.int32
    assert packed.shape == (tokens, words)
    assert packed.stride() == (1, stride) or tokens == 0
    bits = scale.view(torch.uint8).cpu().tolist()
    for t, row in enumerate(packed.cpu().tolist()):
        for w, word in enumerate(row):
            four = [*bits[t], 0, 0, 0][4 * w : 4 * w + 4]
            assert word & 0xFFFFFFFF == sum(code << 8 * b for b, code in enumerate(four))
    whole = packed.as_strided((words, stride), (stride, 1))
    assert (whole[:, tokens:] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_block_scale(device, shape):
    scale = random_scale(*shape, device)
    tokens, groups = shape
    blocks = mhc_ops.block_scale(scale).view(torch.uint8).cpu()
    across = (groups + 3) // 4
    assert blocks.shape == ((tokens + 127) // 128 * across * 512,)
    bits = scale.view(torch.uint8).cpu()
    for t in range(tokens):
        for g in range(groups):
            block = blocks[(t // 128 * across + g // 4) * 512 :]
            assert block[t % 32 * 16 + t % 128 // 32 * 4 + g % 4] == bits[t, g]
    assert (blocks != 0).sum() == bits.numel()  # the rest is padding


@pytest.mark.parametrize("function", [mhc_ops.pack_scale, mhc_ops.block_scale])
def test_scales_of_another_kind(function):
    name = function.__name__
    with pytest.raises(ValueError, match=rf"{name}: scale must have shape \[T, G\], got \[4\]"):
        function(random_scale(1, 4)[0])
    with pytest.raises(TypeError, match=f"{name}: scale must have dtype float8_e8m0fnu, got float"):
        function(torch.ones(1, 4))


class QuantisedLayer(Layer):
    """Its sublayers take (q, scale), which they multiply out: exact in bf16 for powers of two."""

    def forward(self, x, state=None):
        for name in ("attn", "ffn"):
            norm = getattr(self, f"{name}_norm").weight
            (q, scale), state = self.seam(name, x, state, norm)
            wide = scale.float().repeat_interleave(32, dim=1)
            x = getattr(self, name)((q.float() * wide).bfloat16())
        return x, state


class RoundedLayer(Layer):
    """The same, from seams in bf16."""

    def forward(self, x, state=None):
        for name in ("attn", "ffn"):
            h, state = self.seam(name, x, state, getattr(self, f"{name}_norm").weight)
            q, scale = mhc_ops.quantise(h, self.wanted != torch.float32)
            wide = scale.float().repeat_interleave(32, dim=1)
            x = getattr(self, name)((q.float() * wide).bfloat16())
        return x, state


def pair(scale_dtype, device, **options):
    """A layer that quantises in its seams, and one with its weights that does so behind them."""
    quantised = make(QuantisedLayer(scale_dtype=scale_dtype, **options), device)
    rounded = RoundedLayer()
    rounded.wanted = scale_dtype
    rounded = rounded.bfloat16().to(device)
    rounded.load_state_dict(quantised.state_dict())
    return quantised, rounded


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("scale_dtype", SCALES.values(), ids=["ue8m0", "fp32"])
@torch.no_grad()
def test_quantising_layers(device, tokens, scale_dtype):
    quantised, rounded = pair(scale_dtype, device)
    x, state = embeddings(tokens, device), None
    wanted, wanted_state = x, None
    for _ in range(2):
        x, state = quantised(x, state)
        wanted, wanted_state = rounded(wanted, wanted_state)
        assert_same_bits([x, state.residual], [wanted, wanted_state.residual])
    assert_same_bits([leave(x, state)], [leave(wanted, wanted_state)])


@pytest.mark.parametrize("scale_dtype", SCALES.values(), ids=["ue8m0", "fp32"])
@torch.no_grad()
def test_every_seam_quantises(device, scale_dtype):
    quantised, rounded = pair(scale_dtype, device)
    norm = quantised.attn_norm.weight
    x, state = quantised(embeddings(7, device))
    streams = mhc_ops.post(state.residual, x, state.post_mix, state.comb_mix)
    h = rounded.seam("attn", x, state, norm)[0]
    overlapped = copy.deepcopy(quantised)
    overlapped.overlap = True
    wanted = mhc_ops.quantise(h.cpu(), scale_dtype != torch.float32)
    for got in (
        quantised.seam("attn", x, state, norm)[0],
        quantised.seam("attn", x, state, norm, aux=True)[0],
        quantised.seam("attn", None, state._replace(residual=streams), norm)[0],
        overlapped.seam("attn", x, state, norm)[0],
    ):
        assert isinstance(got, tuple)
        assert_same(got, wanted)
    entry = rounded.seam("attn", x, None, norm)[0]
    assert_same(
        quantised.seam("attn", x, None, norm)[0],
        mhc_ops.quantise(entry.cpu(), scale_dtype != torch.float32),
    )


@torch.no_grad()
def test_bad_options():
    with pytest.raises(ValueError, match="scale_dtype must be float8_e8m0fnu or float32, got"):
        DelayedSeam(HIDDEN_SIZE, scale_dtype=torch.bfloat16)
    layer = make(QuantisedLayer(scale_dtype=torch.float32))
    with pytest.raises(ValueError, match="seam: norm_weight is missing; a quantised layer_input"):
        layer.seam("attn", embeddings(3), None)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled(device):
    """Two graphs for every T, the bits of eager."""
    layer, _ = pair(torch.float8_e8m0fnu, device)
    layer.fold("attn")

    def model(x):
        x, state = layer(x)
        x, state = layer(x, state)
        return leave(x, state)

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (1, 2, 7, 64):
        x = embeddings(tokens, device)
        assert_same_bits([compiled(x)], [model(x)])
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
