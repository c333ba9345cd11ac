"""DeepSeek-V4 of the transformers package: a second opinion that nobody here wrote.

Its model runs on a tiny random config; every hyper-connection module's inputs, weights and outputs
are recorded, and `gates`, `post` and V4's composition (collapse with the gate of the *same* seam;
V4.1 uses the previous one's) must give what it gave. In agreement with SPEC section 2: the rows of
fn (pre, post, comb), comb[i, j] with the source stream first (it multiplies by the transpose),
softmax over the destination, columns scaled last, eps added at the same places, post scaled by 2,
and u rounded once from an fp32 sum. Where it differs:

* r is applied to the streams before the projection, not to its result. An fp32 reordering: gates
  agree to GATE_TOLERANCE.
* Its post rounds p and C to bf16, both products, and their sum; SPEC rounds once. In float32 the
  same code has no roundings and is compared exactly, in bf16 to POST_TOLERANCE.
* Its RMSNorm rounds u * r to bf16 before it multiplies by the weight and rounds again; SPEC rounds
  once. A quarter of its elements are not the nearest bf16, and one place off ours.
* Its exit has a gate projection of its own (hc_head); V4.1's exit collapses with the carried gate.
"""

import pytest
import torch

import mhc_ops
from mhc_ops import reference, testing
from mhc_ops.nn import DelayedSeam

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
v4 = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    reason="this transformers has no DeepSeek-V4",
)

HIDDEN_SIZE = 128
GATE_TOLERANCE = 2e-6
# Share of the largest magnitude. p and C in bf16 alone are 2^-9 off.
POST_TOLERANCE = 2**-6


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def recorded(request):
    """(dtype, [(layer, sublayer, record)]) of a forward pass, streams as [T, 4, H]."""
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=64,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        sliding_window=16,
        mlp_layer_types=["moe", "moe"],
        layer_types=["sliding_attention", "sliding_attention"],
        max_position_embeddings=128,
    )
    model = v4.DeepseekV4Model(config).to(request.param).eval()
    sites = []
    for layer in model.layers:
        for name, hc in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc)):
            hc.float()  # as in checkpoints
            torch.nn.init.normal_(hc.fn, std=HIDDEN_SIZE**-0.5)
            torch.nn.init.normal_(hc.base)
            torch.nn.init.uniform_(hc.scale, 0.5, 1.5)
            sublayer = layer.self_attn if name == "attn" else layer.mlp
            norm = layer.input_layernorm if name == "attn" else layer.post_attention_layernorm
            torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            record = {"hc": hc, "norm": norm, "eps": config.rms_norm_eps}
            hc.register_forward_hook(_keep(record, "streams", "gates"))
            norm.register_forward_hook(_keep(record, "collapsed", "layer_input"))
            sublayer.register_forward_hook(_keep(record, None, "sublayer_out"))
            sites.append((layer, name, record))
    with torch.no_grad():
        model(torch.randint(0, 64, (2, 5)), use_cache=False)
    return request.param, sites


def _keep(record, input_key, output_key):
    def hook(module, args, output):
        if input_key:
            record[input_key] = args[0].flatten(0, 1).detach()
        outputs = output if isinstance(output, tuple) else (output,)
        outputs = [o.flatten(0, 1).detach() for o in outputs if isinstance(o, torch.Tensor)]
        record[output_key] = outputs[0] if len(outputs) < 3 else outputs

    return hook


def _gate(record):
    """(fn, hc_scale, hc_base, consts) of a module, weight for weight."""
    hc = record["hc"]
    eps = hc.hc_eps
    constants = (record["eps"], eps, eps, 2.0, hc.hc_sinkhorn_iters)
    return hc.fn.detach(), hc.scale.detach(), hc.base.detach(), *constants


def _theirs(record, streams):
    """(post, comb, collapsed) of its module, from given bf16 streams [T, 4, H]."""
    with torch.no_grad():
        outputs = record["hc"](streams.unsqueeze(0))
    return [o.squeeze(0) for o in outputs]


def test_gates_and_collapse(recorded):
    for _, _, record in recorded[1]:
        streams = record["streams"].bfloat16()
        post, comb, collapsed = _theirs(record, streams)
        post_mix, comb_mix, pre_mix = mhc_ops.gates(streams, *_gate(record))
        torch.testing.assert_close(post_mix.squeeze(-1), post, rtol=0, atol=GATE_TOLERANCE)
        torch.testing.assert_close(comb_mix, comb, rtol=0, atol=GATE_TOLERANCE)
        assert comb.sub(comb.mT).abs().max() > 0.01  # the orientation is seen
        # Their pre gate shows in what it collapses to.
        exact = torch.einsum("tj,tjh->th", pre_mix.double(), streams.double())
        flips, worst = testing.rounding_errors(collapsed, exact)
        assert flips < testing.FLIP_TOLERANCE, flips
        assert worst < testing.ULP_TOLERANCE, worst


def test_recorded_gates(recorded):
    """The same for what its forward pass really saw, where its streams are in bf16."""
    dtype, sites = recorded
    if dtype != torch.bfloat16:
        pytest.skip("the operators take bf16 streams")
    for _, _, record in sites:
        post, comb, collapsed = record["gates"]
        streams = record["streams"]
        post_mix, comb_mix, pre_mix = mhc_ops.gates(streams, *_gate(record))
        torch.testing.assert_close(post_mix.squeeze(-1), post, rtol=0, atol=GATE_TOLERANCE)
        torch.testing.assert_close(comb_mix, comb, rtol=0, atol=GATE_TOLERANCE)
        assert (collapsed == reference.collapse(streams, pre_mix)).float().mean() > 0.99


def test_post(recorded):
    """Its decoder layer, with given sublayer outputs in place of attention.

    In the first layer all streams are equal and hide comb's orientation; the second shows it.
    """
    dtype, sites = recorded
    for layer, name, record in sites:
        if name != "attn":
            continue  # what the ffn seam receives is what the attn seam's post made
        streams, x = record["streams"].bfloat16(), record["sublayer_out"].bfloat16()
        theirs = _their_post(layer, streams.to(dtype), x.to(dtype))
        post_mix, comb_mix, _ = mhc_ops.gates(streams, *_gate(record))
        ours = mhc_ops.post(streams, x, post_mix, comb_mix)
        if dtype == torch.float32:
            flips, worst = testing.rounding_errors(ours, theirs.double())
            assert flips < testing.FLIP_TOLERANCE, flips
            assert worst < testing.ULP_TOLERANCE, worst
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < POST_TOLERANCE, error


class _Constant(torch.nn.Module):
    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, *args, **kwargs):
        return self.outputs if len(self.outputs) > 1 else self.outputs[0]


def _their_post(layer, streams, x):
    """The streams that its layer hands to its second seam."""
    seen = []
    attention, mlp = layer.self_attn, layer.mlp
    hook = layer.ffn_hc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        layer.self_attn = _Constant(x.unsqueeze(0), None)
        layer.mlp = _Constant(torch.zeros_like(x).unsqueeze(0))
        with torch.no_grad():
            layer(streams.unsqueeze(0))
    finally:
        hook.remove()
        layer.self_attn, layer.mlp = attention, mlp
    return seen[0].squeeze(0)


def test_layer_input_of_the_composition(recorded):
    """gates, then a collapse with the same seam's pre_mix, then the norm: V4's own order."""
    for _, _, record in recorded[1]:
        streams = record["streams"].bfloat16()
        norm = record["norm"]
        weight = norm.weight.detach().bfloat16()
        *_, pre_mix = mhc_ops.gates(streams, *_gate(record))
        *_, layer_input, _ = mhc_ops.pre_delayed(
            streams, *_gate(record), pre_mix, weight, norm.variance_epsilon
        )
        collapsed = _theirs(record, streams)[2].bfloat16()
        with torch.no_grad():
            theirs = norm.bfloat16()(collapsed)
        u = collapsed.double()
        r = torch.rsqrt(u.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        ulp = testing.ulp(u * r * weight.double())
        off = (layer_input.double() - theirs.double()).abs() / ulp
        assert off.quantile(0.99) <= 1, off.quantile(0.99)
        assert off.max() <= 2, off.max()


def test_weights_load_under_checkpoint_names(recorded):
    """What transformers calls attn_hc.fn is hc_attn_fn in a checkpoint and in a DelayedSeam."""
    layer = recorded[1][0][0]
    checkpoint = {
        f"hc_{name}_{kind}": getattr(hc, kind).detach()
        for name, hc in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc))
        for kind in ("fn", "base", "scale")
    }
    ours = DelayedSeam(HIDDEN_SIZE)
    ours.load_state_dict(checkpoint, strict=True)
    for key, value in checkpoint.items():
        assert torch.equal(getattr(ours, key), value)
