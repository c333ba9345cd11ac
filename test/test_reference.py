"""The numbers: against float64, against the formula written out, and against each other."""

import itertools
import math

import pytest
import torch
from cases import OPERATORS, OPTIONAL, assert_same_bits, judged, label, operator, seam

from mhc_ops.testing import assert_accurate, exact_gates, make_inputs

TOKENS = (0, 1, 2, 7, 64, 65, 130)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_operator(device, seed, name, tokens):
    given = make_inputs(tokens, 256, seed=seed, device=device)
    assert_accurate(judged(name, given), seam(name, given))


@pytest.mark.parametrize("optional", OPTIONAL, ids=label)
@pytest.mark.parametrize("name", OPERATORS)
def test_optional_inputs(device, seed, name, optional):
    given = make_inputs(7, 384, seed=seed, device=device, **optional)
    assert_accurate(judged(name, given), seam(name, given))


@pytest.mark.parametrize("hc_scale", [1, 10, 30])
@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_gate_scales_and_iterations(device, seed, hc_scale, repeat):
    given = make_inputs(
        65, 512, seed=seed, device=device, hc_scale=hc_scale, sinkhorn_repeat=repeat
    )
    assert_accurate(given, seam("post_pre_delayed", given))


@pytest.mark.parametrize("hidden_size", [4096, 5120, 7168])
def test_model_sizes(device, seed, hidden_size):
    given = make_inputs(7, hidden_size, seed=seed, device=device, hc_scale=30)
    assert_accurate(given, seam("post_pre_delayed", given))


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e3])
def test_rms_eps_of_checkpoints(device, seed, magnitude):
    """rms_norm_eps is 1e-6 or 1e-20: with streams of 1e-4 the two differ visibly."""
    given = make_inputs(7, 512, seed=seed, device=device)
    small = {n: getattr(given, n) * magnitude for n in ("residual", "sublayer_out")}
    results = {}
    for eps in (1e-6, 1e-20):
        case = given._replace(rms_eps=eps, norm_eps=eps, **small)
        results[eps] = seam("post_pre_delayed", case)
        assert_accurate(case, results[eps])
    if magnitude == 1e-4:
        assert not torch.equal(results[1e-6][3], results[1e-20][3])


def by_formula(given):
    """SPEC's steps for tokens, streams and columns one at a time, in Python's float64.

    Shares no code with the package, so that a misreading there cannot hide in its own checker.
    """
    n, hidden = 4, given.residual.shape[2]

    def bf16(value):
        return torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).item()

    def sigmoid(value):
        return 1 / (1 + math.exp(-value))

    fn, base, scale = given.fn.tolist(), given.hc_base.tolist(), given.hc_scale.tolist()
    weight = given.norm_weight.tolist()
    results = []
    for t in range(given.residual.shape[0]):
        r, x = given.residual[t].tolist(), given.sublayer_out[t].tolist()
        p, c = given.post_layer_mix[t].flatten().tolist(), given.comb_res_mix[t].tolist()
        q = given.pre_mix[t].tolist()
        streams = [
            [bf16(p[j] * x[h] + sum(c[i][j] * r[i][h] for i in range(n))) for h in range(hidden)]
            for j in range(n)
        ]
        flat = list(itertools.chain(*streams))
        rms = math.sqrt(sum(v * v for v in flat) / (n * hidden) + given.rms_eps)
        m = [sum(w * v for w, v in zip(row, flat, strict=True)) / rms for row in fn]
        pre = [sigmoid(m[k] * scale[0] + base[k]) + given.hc_pre_eps for k in range(4)]
        post = [sigmoid(m[k] * scale[1] + base[k]) * given.hc_post_mult_value for k in range(4, 8)]
        eps = given.hc_sinkhorn_eps
        exps = [[math.exp(m[8 + 4 * i + j] * scale[2] + base[8 + 4 * i + j]) for j in range(n)]
                for i in range(n)]  # fmt: skip
        comb = [[e / sum(row) + eps for e in row] for row in exps]
        for step in range(given.sinkhorn_repeat):
            if step > 0:
                comb = [[v / (sum(row) + eps) for v in row] for row in comb]
            sums = [sum(comb[i][j] for i in range(n)) + eps for j in range(n)]
            comb = [[comb[i][j] / sums[j] for j in range(n)] for i in range(n)]
        u = [bf16(sum(q[j] * streams[j][h] for j in range(n))) for h in range(hidden)]
        norm = math.sqrt(sum(v * v for v in u) / hidden + given.norm_eps)
        layer_input = [bf16(v / norm * w) for v, w in zip(u, weight, strict=True)]
        results.append((streams, [[v] for v in post], comb, layer_input, pre))
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*results, strict=True)]


def test_the_formula_written_out(device, seed):
    given = make_inputs(2, 128, seed=seed, device=device, hc_scale=3, sinkhorn_repeat=4)
    wanted = by_formula(given)
    streams, post_mix, comb_mix, layer_input, next_pre_mix = (
        t.double().cpu() for t in seam("post_pre_delayed", given)
    )
    for got, exact in ((post_mix, 1), (comb_mix, 2), (next_pre_mix, 4)):
        torch.testing.assert_close(got, wanted[exact], rtol=0, atol=1e-5)
    # A value near the middle of two bf16 may go either way in fp32: one in 1,024 elements.
    for got, exact in ((streams, 0), (layer_input, 3)):
        assert (got != wanted[exact]).double().mean() <= 2e-3
        torch.testing.assert_close(got, wanted[exact], rtol=2**-7, atol=1e-3)


def test_checker_follows_the_formula(seed):
    given = make_inputs(2, 128, seed=seed, hc_scale=3, sinkhorn_repeat=4)
    wanted = by_formula(given)
    for got, exact in zip(exact_gates(wanted[0], given), (1, 2, 4), strict=True):
        torch.testing.assert_close(got, wanted[exact], rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [50, 1e3, 1e4])
def test_huge_comb_logits(device, seed, factor):
    given = make_inputs(65, 256, seed=seed, device=device)
    base = given.hc_base.clone()
    base[8:] *= factor
    given = given._replace(hc_base=base)
    results = seam("post_pre_delayed", given)
    assert all(r.isfinite().all() for r in results)
    assert_accurate(given, results)


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_are_fresh_and_contiguous(device, name):
    given = make_inputs(7, 256, device=device)
    results = seam(name, given)
    owned = results if name == "post_pre_delayed" else results[1:]
    inputs = [v for v in given if isinstance(v, torch.Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in (*owned, *inputs)]
    assert len(set(storages)) == len(storages)
    assert all(r.is_contiguous() and r.storage_offset() == 0 for r in owned)


@pytest.mark.parametrize("name", ["post_pre_delayed_", "post_pre_delayed_out"])
@pytest.mark.parametrize("tokens", [1, 65])
def test_same_bits_wherever_the_streams_go(device, seed, name, tokens):
    given = make_inputs(tokens, 640, seed=seed, device=device)
    assert_same_bits(seam(name, given), seam("post_pre_delayed", given))


@pytest.mark.parametrize("optional", OPTIONAL, ids=label)
def test_pre_delayed_is_the_rest_of_post_pre_delayed(device, seed, optional):
    given = make_inputs(65, 640, seed=seed, device=device, **optional)
    whole = seam("post_pre_delayed", given)
    rest = seam("pre_delayed", given._replace(residual=whole[0]))
    if device == "cpu":
        assert_same_bits(rest, whole)
    else:  # the two are compiled separately, which may contract a sum differently
        assert_accurate(judged("pre_delayed", given), rest)


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(device, seed, name):
    given = make_inputs(7, 256, seed=seed, device=device)
    wanted = seam(name, given)
    with torch.autocast(device, torch.bfloat16):
        assert_same_bits(seam(name, given), wanted)


def test_matmul_precision_changes_nothing(device, seed):
    given = make_inputs(65, 512, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_same_bits(seam("post_pre_delayed", given), wanted)
    finally:
        torch.set_float32_matmul_precision(before)


def test_same_call_same_bits(device, seed):
    given = make_inputs(65, 640, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)
    for _ in range(50 if device == "cuda" else 3):
        seam("post_pre_delayed", make_inputs(7, 256, device=device))  # another in between
        assert_same_bits(seam("post_pre_delayed", given), wanted)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_tokens(device, name):
    given = make_inputs(0, 256, device=device)
    results = seam(name, given)
    assert [tuple(r.shape) for r in results] == [
        (0, 4, 256), (0, 4, 1), (0, 4, 4), (0, 256), (0, 4),
    ]  # fmt: skip
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [r.dtype for r in results] == [bf16, fp32, fp32, bf16, fp32]


def test_keyword_calls(device, seed):
    given = make_inputs(7, 256, seed=seed, device=device)
    assert_same_bits(
        operator("post_pre_delayed")(**given._asdict()), seam("post_pre_delayed", given)
    )
