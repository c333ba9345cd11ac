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


def seam_bytes(tokens, hidden_size):
    """Bytes that a fused seam must move: R, x in; R', layer_input out, all bf16; fn, fp32."""
    return tokens * hidden_size * 2 * (4 + 1 + 4 + 1) + 24 * 4 * hidden_size * 4


def exact_streams(given):
    """R' before rounding, float64 [T, 4, H]."""
    p = given.post_layer_mix.double().reshape(-1, 4)
    return torch.einsum("tj,th->tjh", p, given.sublayer_out.double()) + torch.einsum(
        "tij,tih->tjh", given.comb_res_mix.double(), given.residual.double()
    )


def exact_gates(streams, given):
    """post' [T, 4, 1], comb' [T, 4, 4], pre' [T, 4] in float64, from the rounded R'."""
    flat = streams.double().flatten(1)
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
    """layer_input before its own rounding, float64, from the rounded R': tensors [T, H] of which
    the nearest counts, element by element.

    Where u is within a tie it may go either way, and that also moves its whole row a little,
    through the sum of squares.
    """
    if given.pre_mix is None:
        low = u = high = streams[:, 0].double()
    else:
        terms = given.pre_mix.double()[:, :, None] * streams.double()
        exact = terms.sum(1)
        if given.norm_weight is None:
            return (exact,)
        # Close to the middle, or closer than an fp32 sum of four is exact when its terms cancel.
        near = TIE * ulp(exact) + terms.abs().sum(1) * 2.0**-22
        low, u, high = ((exact + d).to(torch.bfloat16).double() for d in (-near, 0, near))
    if given.norm_weight is None:
        return (u,)
    squares = (u * u).sum(1, keepdim=True)
    spread = (high * high - low * low).abs().sum(1, keepdim=True) / (2 * squares)
    scale = given.norm_weight.double() * torch.rsqrt(squares / u.shape[1] + given.norm_eps)
    return tuple(v * scale * k for v in (low, high) for k in (1 - spread, 1 + spread))


def exact_aux(streams):
    """aux before rounding, float64 [T, H], from the rounded R'."""
    return streams.double().mean(1)


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


def errors(
    given, streams, post_mix=None, comb_mix=None, layer_input=None, next_pre_mix=None, aux=None
):
    """{output: (error, limit)} of an operator's outputs against float64; None: it has no such one.

    Everything but R' itself is judged from the returned R'; without post, pass the input streams,
    or x as [T, 1, H] where the model begins."""
    report = {}

    def rounded(name, got, *exact):
        flips, worst = rounding_errors(got, *exact)
        # One element of a small output may always flip.
        report[f"{name} flips"] = flips, max(FLIP_TOLERANCE, 1 / max(got.numel(), 1))
        report[f"{name} ulp"] = worst, ULP_TOLERANCE

    if given.sublayer_out is not None:
        rounded("residual_out", streams, exact_streams(given))
    if post_mix is not None:
        exact = exact_gates(streams, given)
        names = ("post_mix", "comb_mix", "next_pre_mix")
        for name, got, want in zip(names, (post_mix, comb_mix, next_pre_mix), exact, strict=True):
            worst = (got.double() - want).abs().max().item() if got.numel() else 0.0
            report[name] = worst, GATE_TOLERANCE
    if layer_input is not None:
        rounded("layer_input", layer_input, *exact_layer_inputs(streams, given))
    if aux is not None:
        rounded("aux", aux, exact_aux(streams))
    return report


def assert_accurate(given, outputs):
    """Raise AssertionError unless an operator's outputs, in the order of `errors`, hold SPEC's
    numbers. NaN never passes."""
    bad = {k: v for k, v in errors(given, *outputs).items() if not v[0] <= v[1]}
    assert not bad, f"out of tolerance, (error, limit): {bad}"
