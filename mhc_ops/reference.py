"""The seam in plain PyTorch, rounding where the contract rounds. Also the CPU backend (`run`).

n = 4 streams, H hidden size, K = 4 * H. i is the source stream, j the destination stream.
Everything is fp32 except the three roundings to bf16, which are written `.bfloat16()`.
The mixing follows arXiv 2512.24880 (manifold-constrained hyper-connections).
"""

import torch

from .checks import GROUP, HC_MULT

# Tokens per step: at H = 5120 one block's fp32 and fp64 temporaries are about 30 MB.
BLOCK_TOKENS = 64


def run(given, made):
    """Fill what is in `made` from `given`, a block of tokens at a time."""
    # Inside an operator the caller's autocast still applies to every op called here.
    with torch.autocast(given.source.device.type, enabled=False):
        for begin in range(0, given.source.shape[0], BLOCK_TOKENS):
            rows = slice(begin, begin + BLOCK_TOKENS)
            if given.residual is None:
                # One stream stands for the four equal ones: fn is folded, r and u are the same.
                streams = given.sublayer_out[rows].unsqueeze(1)
            elif given.sublayer_out is None:
                streams = given.residual[rows]
            else:
                streams = post(
                    given.residual[rows],
                    given.sublayer_out[rows],
                    given.post_layer_mix[rows],
                    given.comb_res_mix[rows],
                )
            if made.residual_out is not None:
                made.residual_out[rows] = streams
            if made.post_mix is not None:
                made.post_mix[rows], made.comb_mix[rows], made.next_pre_mix[rows] = gates(
                    streams, *given.gate
                )
            if made.layer_input is not None:
                pre_mix = None if given.pre_mix is None else given.pre_mix[rows]
                normed = norm(collapse(streams, pre_mix), given.norm_weight, given.norm_eps)
                if made.layer_input_scale is None:
                    made.layer_input[rows] = normed
                else:
                    ue8m0 = made.layer_input_scale.dtype != torch.float32
                    made.layer_input[rows], made.layer_input_scale[rows] = quantise(normed, ue8m0)
            if made.aux is not None:
                made.aux[rows] = mean(streams)


def post(residual, sublayer_out, post_layer_mix, comb_res_mix):
    """R'_j = bf16( p_j * x + sum_i C[i, j] * R_i ), [T, 4, H]. First rounding."""
    p = post_layer_mix.reshape(-1, HC_MULT, 1)
    mixed = p * sublayer_out.float().unsqueeze(1)
    for i in range(HC_MULT):
        mixed += comb_res_mix[:, i, :, None] * residual[:, i : i + 1].float()
    return mixed.bfloat16()


def gates(
    streams,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
):
    """post' [T, 4, 1], comb' [T, 4, 4] and pre' [T, 4] from the rounded streams R'."""
    flat = streams.flatten(1).float()
    r = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    logits = project(flat, fn) * r
    pre = torch.sigmoid(logits[:, :4] * hc_scale[0] + hc_base[:4]) + hc_pre_eps
    post_mix = torch.sigmoid(logits[:, 4:8] * hc_scale[1] + hc_base[4:8]) * hc_post_mult_value
    comb = (logits[:, 8:] * hc_scale[2] + hc_base[8:]).unflatten(1, (HC_MULT, HC_MULT))
    return post_mix.unsqueeze(-1), sinkhorn(comb, hc_sinkhorn_eps, sinkhorn_repeat), pre


def project(flat, fn):
    """m = W . flatten(R'), [T, 24] fp32."""
    if flat.device.type == "cpu":
        # A float32 matmul may run in bf16 under set_float32_matmul_precision("medium").
        return (flat.double() @ fn.double().t()).float()
    return flat @ fn.t()


def sinkhorn(logits, eps, repeat):
    """Softmax over j, then alternately columns and rows scaled to sum 1; columns last."""
    p = torch.softmax(logits, dim=-1) + eps
    p = p / (p.sum(dim=-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        p = p / (p.sum(dim=-1, keepdim=True) + eps)
        p = p / (p.sum(dim=-2, keepdim=True) + eps)
    return p


def collapse(streams, pre_mix):
    """u = bf16( sum_j q_j * R'_j ), [T, H]; stream 0 without gates. Second rounding."""
    if pre_mix is None:
        return streams[:, 0]
    u = pre_mix[:, 0, None] * streams[:, 0].float()
    for j in range(1, HC_MULT):
        u += pre_mix[:, j, None] * streams[:, j].float()
    return u.bfloat16()


def mean(streams):
    """aux = bf16( sum_j R'_j / 4 ), [T, H]: a collapse whose gates are exact."""
    quarter = streams.new_full((1, HC_MULT), 1 / HC_MULT, dtype=torch.float32)
    return collapse(streams, quarter)


def norm(u, norm_weight, norm_eps):
    """layer_input = bf16( u * rsqrt( mean(u^2) + norm_eps ) * w ), [T, H]. Third rounding."""
    if norm_weight is None:
        return u
    u = u.float()
    scale = torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    return (u * scale * norm_weight.float()).bfloat16()


def quantise(y, ue8m0):
    """(q [T, H] float8_e4m3fn, scale [T, H / 32] float8_e8m0fnu or fp32) of y [T, H] bf16."""
    groups = y.float().unflatten(-1, (-1, GROUP))
    # s = max( max|y|, 1e-4 ) / 448
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    if ue8m0:  # up to a power of two; e8m0 has NaN for what is not finite
        above = (scale.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), above, torch.nan)
    q = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    if ue8m0:  # a power of two is its exponent
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    return q.flatten(-2), scale.squeeze(-1)
