"""Inputs whose outputs are known without computing them."""

import pytest
import torch
from cases import OPERATORS, PER_TOKEN, assert_same_bits, judged, seam

from mhc_ops.testing import assert_accurate, make_inputs

TOKENS = (1, 7, 65, 130)
H = 640  # not a power of two


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("tokens", TOKENS)
def test_comb_as_a_permutation_moves_streams(device, seed, tokens, shift):
    """C[i, j] has the source first: with C[i, i + shift] = 1, R'_(i + shift) is R_i."""
    given = make_inputs(tokens, H, seed=seed, device=device)
    comb = torch.roll(torch.eye(4, device=device), shift, dims=1).expand(tokens, 4, 4)
    given = given._replace(
        comb_res_mix=comb.contiguous(), post_layer_mix=torch.zeros_like(given.post_layer_mix)
    )
    moved = torch.roll(given.residual, shift, dims=1)
    assert torch.equal(seam("post_pre_delayed", given)[0], moved)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm_makes_the_mean_square_one(device, seed, name, tokens):
    given = make_inputs(tokens, H, seed=seed, device=device)
    given = given._replace(norm_weight=torch.ones_like(given.norm_weight))
    mean_square = seam(name, given)[3].float().square().mean(-1)
    torch.testing.assert_close(mean_square, torch.ones_like(mean_square), rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", OPERATORS)
def test_zero_logits_give_equal_gates(device, seed, name):
    given = make_inputs(7, H, seed=seed, device=device)
    given = given._replace(hc_base=torch.zeros(24, device=device), hc_scale=given.hc_scale * 0)
    _, post_mix, comb_mix, _, next_pre_mix = seam(name, given)
    for got, wanted in ((post_mix, 1.0), (comb_mix, 0.25), (next_pre_mix, 0.5 + 1e-6)):
        torch.testing.assert_close(got, torch.full_like(got, wanted), rtol=0, atol=1e-6)


def test_columns_of_comb_sum_to_one(device, seed):
    given = make_inputs(65, H, seed=seed, device=device, hc_scale=10)
    columns = seam("post_pre_delayed", given)[2].double().sum(1)
    torch.testing.assert_close(columns, torch.ones_like(columns), rtol=0, atol=2e-6)


def test_one_iteration_ends_with_columns(device, seed):
    given = make_inputs(65, H, seed=seed, device=device, sinkhorn_repeat=1)
    comb = seam("post_pre_delayed", given)[2].double()
    # eps over a column's sum before it is scaled, which is seldom under 0.1
    assert (comb.sum(1) - 1).abs().max() < 1e-4
    assert (comb.sum(2) - 1).abs().max() > 1e-2


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_eps_where_it_belongs(device, seed, name, tokens):
    """Of a size that shows: at 1e-6 an eps outside its root hardly does."""
    given = make_inputs(tokens, H, seed=seed, device=device)
    given = given._replace(rms_eps=0.3, hc_pre_eps=0.05, hc_sinkhorn_eps=0.02, norm_eps=0.4)
    assert_accurate(judged(name, given), seam(name, given))


@pytest.mark.parametrize("norm_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_without_pre_mix_the_collapse_is_stream_0(device, seed, name, norm_dtype):
    given = make_inputs(7, H, seed=seed, device=device, pre_mix=False, norm_dtype=norm_dtype)
    streams, _, _, layer_input, _ = seam(name, given)
    if norm_dtype is None:
        assert torch.equal(layer_input, streams[:, 0])
    identity = torch.tensor([[1.0, 0, 0, 0]], device=device).expand(7, 4).contiguous()
    same = seam(name, given._replace(pre_mix=identity))[3]
    torch.testing.assert_close(same.float(), layer_input.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_norm_weight_zero_and_negative(device, seed, norm_dtype):
    given = make_inputs(7, H, seed=seed, device=device, norm_dtype=norm_dtype)
    plain = seam("post_pre_delayed", given)[3]
    weight = given.norm_weight.clone()
    weight[::3] = 0
    weight[1::3] *= -1
    got = seam("post_pre_delayed", given._replace(norm_weight=weight))[3]
    assert (got[:, ::3] == 0).all()
    assert torch.equal(got[:, 1::3], -plain[:, 1::3])
    assert torch.equal(got[:, 2::3], plain[:, 2::3])


@pytest.mark.parametrize("tokens", TOKENS)
def test_blocks_of_constants_come_out_exactly(device, tokens):
    """Small integers, so that every sum is exact: any mixed up token, stream or block shows."""
    given = make_inputs(tokens, H, device=device)
    t = torch.arange(tokens, device=device)[:, None, None]
    j = torch.arange(4, device=device)[None, :, None]
    block = (torch.arange(H, device=device) // 64)[None, None, :]
    residual = (t % 5 + 8 * j + block).to(torch.bfloat16)
    x = (t[:, 0] % 3 + block[0]).to(torch.bfloat16)
    comb = (2.0 * torch.eye(4, device=device)).expand(tokens, 4, 4).clone()
    comb[:, 0, 3] = 1
    post = (1.0 + torch.arange(4, device=device)).expand(tokens, 4).contiguous()
    pre_mix = torch.tensor([[1.0, 0, -1, 0]], device=device).expand(tokens, 4).contiguous()
    given = given._replace(
        residual=residual, sublayer_out=x, comb_res_mix=comb, post_layer_mix=post,
        pre_mix=pre_mix, norm_weight=None,
    )  # fmt: skip
    wanted = 2 * residual.double() + post.double()[:, :, None] * x.double()[:, None]
    wanted[:, 3] += residual[:, 0].double()
    results = seam("post_pre_delayed", given)
    assert torch.equal(results[0].double(), wanted)
    assert torch.equal(results[3].double(), wanted[:, 0] - wanted[:, 2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("argument", PER_TOKEN)
def test_a_bad_row_stays_alone(device, seed, argument, value):
    tokens, bad = 70, 3
    given = make_inputs(tokens, H, seed=seed, device=device)
    wanted = seam("post_pre_delayed", given)
    tensor = getattr(given, argument).clone()
    tensor[bad] = value
    got = seam("post_pre_delayed", given._replace(**{argument: tensor}))
    others = [t for t in range(tokens) if t != bad]
    assert_same_bits([g[others] for g in got], [w[others] for w in wanted])
    # pre_mix only enters the collapse.
    reached = [got[3]] if argument == "pre_mix" else got
    assert all(not r[bad].isfinite().any() for r in reached)


@pytest.mark.parametrize("column", [0, H - 1])
def test_one_nan_reaches_every_gate_of_its_row(device, seed, column):
    given = make_inputs(7, H, seed=seed, device=device)
    residual = given.residual.clone()
    residual[3, 2, column] = torch.nan
    streams, *rest = seam("post_pre_delayed", given._replace(residual=residual))
    assert streams[3, :, column].isnan().all()
    assert all(r[3].isnan().all() for r in rest)
    assert all(r[[0, 1, 2, 4, 5, 6]].isfinite().all() for r in (streams, *rest))
