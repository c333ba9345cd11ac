"""Inputs, the float64 seam and the error measures that tests, demo and benchmarks share."""

import math

import torch

from .ops import Given

# Absolute error of a gate against float64, from the operator's own returned R'. Correct fp32
# stays under 1e-6, bf16 hi + lo weights under 1e-5; W in TF32 gives 7e-4, 19 iterations 1e-3.
GATE_TOLERANCE = 2e-5
# Share of bf16 elements that may differ from the nearest bf16 of the exact value: fp32 sums
# land on the other side of a rounding boundary for about 1e-4 of random elements.
FLIP_TOLERANCE = 1e-3
# No element may be further off than this, in units of the last bf16 place.
ULP_TOLERANCE = 1.5
# A value within this share of an ulp of the middle between two bf16 may go either way.
TIE = 0.005


def make_inputs(
    tokens,
    hidden_size,
    *,
    seed=0,
    device="cpu",
    pre_mix=True,
    norm_dtype=torch.bfloat16,
    hc_scale=1.0,
    sinkhorn_repeat=20,
):
    """A `Given` with realistic scales: streams N(0, 1), fn N(0, 1/K), so that the projection
    after its RMS is N(0, 1), times hc_scale.

    Drawn on the CPU, so that a seed means the same numbers on every device.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=g).to(dtype).to(device)

    def uniform(*shape):
        return torch.rand(shape, generator=g).to(device)

    bf16 = torch.bfloat16
    residual = normal(tokens, 4, hidden_size, dtype=bf16)
    fn = normal(24, 4 * hidden_size) / math.sqrt(4 * hidden_size)
    scale = torch.full((3,), float(hc_scale), device=device)
    base = normal(24)
    pre = uniform(tokens, 4)
    x = normal(tokens, hidden_size, dtype=bf16)
    post = 2 * uniform(tokens, 4, 1)
    comb = torch.softmax(normal(tokens, 4, 4), dim=-1)
    weight = 1 + 0.1 * normal(hidden_size)
    norm_weight = None if norm_dtype is None else weight.to(norm_dtype)
    return Given(
        residual,
        fn,
        scale,
        base,
        1e-6,
        1e-6,
        1e-6,
        2.0,
        sinkhorn_repeat,
        pre if pre_mix else None,
        x,
        post,
        comb,
        norm_weight,
        1e-6,
    )


def exact_streams(given):
    """R' before rounding, float64 [T, 4, H]."""
    p = given.post_layer_mix.double().reshape(-1, 4)
    return torch.einsum("tj,th->tjh", p, given.sublayer_out.double()) + torch.einsum(
        "tij,tih->tjh", given.comb_res_mix.double(), given.residual.double()
    )


def exact_gates(streams, given):
    """post' [T, 4, 1], comb' [T, 4, 4], pre' [T, 4] in float64, from the rounded R'."""
    flat = streams.double().reshape(streams.shape[0], -1)
    rms = torch.sqrt((flat * flat).sum(1) / flat.shape[1] + given.rms_eps)
    m = torch.einsum("tk,mk->tm", flat, given.fn.double()) / rms[:, None]
    scale = given.hc_scale.double().repeat_interleave(torch.tensor([4, 4, 16]).to(m.device))
    logits = m * scale + given.hc_base.double()
    pre = 1 / (1 + torch.exp(-logits[:, 0:4])) + given.hc_pre_eps
    post = given.hc_post_mult_value / (1 + torch.exp(-logits[:, 4:8]))
    comb = logits[:, 8:24].reshape(-1, 4, 4)
    comb = torch.exp(comb - comb.amax(2, keepdim=True))
    comb = comb / comb.sum(2, keepdim=True) + given.hc_sinkhorn_eps
    for step in range(2 * given.sinkhorn_repeat - 1):
        axis = 1 if step % 2 == 0 else 2  # columns (over i) first and last
        comb = comb / (comb.sum(axis, keepdim=True) + given.hc_sinkhorn_eps)
    return post[:, :, None], comb, pre


def exact_layer_inputs(streams, given):
    """layer_input before its own rounding, float64 [T, H], from the rounded R': one for each way
    that u's ties may go, since half an ulp of u can be over two of layer_input."""
    if given.pre_mix is None:
        us = (streams[:, 0].double(),)
    else:
        exact = torch.einsum("tj,tjh->th", given.pre_mix.double(), streams.double())
        if given.norm_weight is None:
            return (exact,)
        near = TIE * ulp(exact)
        us = tuple((exact + d).to(torch.bfloat16).double() for d in (-near, near))
    if given.norm_weight is None:
        return us
    weight = given.norm_weight.double()
    return tuple(
        u * torch.rsqrt((u * u).mean(1, keepdim=True) + given.norm_eps) * weight for u in us
    )


def ulp(exact):
    """A last bf16 place of each element of `exact`.

    Where terms cancel, `exact` is far smaller than what was summed and an fp32 sum's error can be
    many of its ulps: elements under 2^-10 of the tensor's mean magnitude count in that magnitude's.
    """
    floor = exact.abs().mean() * 2.0**-10
    magnitude = torch.maximum(exact.abs(), floor.clamp_min(2.0**-120))
    return torch.exp2(torch.floor(torch.log2(magnitude)) - 7)


def rounding_errors(got, *exact):
    """(share of elements that are not a nearest bf16 of `exact`, largest error in ulp).

    Of several `exact` the nearest counts, element by element.
    """
    if got.numel() == 0:
        return 0.0, 0.0
    error = torch.stack([(got.double() - e).abs() / ulp(e) for e in exact]).amin(0)
    return (~(error <= 0.5 + TIE)).double().mean().item(), error.max().item()


def errors(given, streams, post_mix, comb_mix, layer_input, next_pre_mix):
    """{output: (error, limit)} of a seam's outputs against float64. Everything but R' itself is
    judged from the returned R'; without post, pass the input streams."""
    report = {}
    if given.sublayer_out is not None:
        flips, worst = rounding_errors(streams, exact_streams(given))
        report["residual_out flips"] = flips, FLIP_TOLERANCE
        report["residual_out ulp"] = worst, ULP_TOLERANCE
    exact = exact_gates(streams, given)
    names = ("post_mix", "comb_mix", "next_pre_mix")
    for name, got, want in zip(names, (post_mix, comb_mix, next_pre_mix), exact, strict=True):
        worst = (got.double() - want).abs().max().item() if got.numel() else 0.0
        report[name] = worst, GATE_TOLERANCE
    flips, worst = rounding_errors(layer_input, *exact_layer_inputs(streams, given))
    report["layer_input flips"] = flips, FLIP_TOLERANCE
    report["layer_input ulp"] = worst, ULP_TOLERANCE
    return report


def assert_accurate(given, outputs):
    """Raise AssertionError unless a seam's five outputs hold SPEC's numbers. NaN never passes."""
    bad = {k: v for k, v in errors(given, *outputs).items() if not v[0] <= v[1]}
    assert not bad, f"out of tolerance, (error, limit): {bad}"
