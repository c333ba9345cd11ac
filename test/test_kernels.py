"""The Triton kernels themselves, under Triton's interpreter: no GPU needed."""

import dataclasses
import functools

import bf16_interpreter  # noqa: F401  before any kernel runs
import canary
import pytest
import torch
from cases import OPTIONAL, arguments, assert_same_bits, call, judged, label, without_post

from mhc_ops import configs, launch, ops
from mhc_ops.testing import assert_accurate, make_inputs

pytestmark = [
    pytest.mark.interpreter,
    # NaN in a bad row, and in the unused columns of a workspace.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    # Triton 3.6.0's interpreter under numpy 2.3
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

# A Sinkhorn iteration takes about 5 ms of a gate program here.
FEW = 3

PLAIN = configs.Config(
    max_tokens=None, fused=True, row_block=128, row_warps=4, block_t=16, block_h=64, cols=128,
    warps=4, stages=1, fence=False, pack=False, gate_t=16, split_block=4, gate_warps=4,
)  # fmt: skip
# One edge of the kernels at a time, where PLAIN is in the middle.
EDGES = {
    "plain": {},
    "one split": {"cols": None},
    "a split a step": {"cols": 64},
    "splits of unequal size": {"cols": 192},
    "a split wider than H": {"cols": 1024},
    "narrow steps": {"block_h": 16, "cols": 96},
    "wide steps": {"block_h": 128, "cols": 128},
    "32 tokens": {"block_t": 32},
    "64 tokens": {"block_t": 64},
    "a token a program": {"block_t": 1},
    "two tokens, splits of unequal size": {"block_t": 2, "cols": 64},
    "four tokens, steps past H": {"block_t": 4, "cols": 128},
    "packed": {"pack": True},
    "packed, one split": {"pack": True, "cols": None, "block_t": 64},
    "gates a token each": {"gate_t": 1},
    "gates of all tokens": {"gate_t": 64},
    "splits one by one": {"split_block": 1},
    "more than all splits": {"split_block": 32},
    "rows first": {"fused": False},
    "rows first, packed": {"fused": False, "pack": True},
    "rows in one step": {"row_block": 512},
    "rows in unequal steps": {"row_block": 256},
    "row steps past H": {"row_block": 1024},
}


def backend(config):
    """The GPU backend with the configuration given. "" is no vendor: the fence is inline
    assembly, which the interpreter does not run."""
    return lambda given, made: launch.run_with(config, "", given, made)


def seam(config, given):
    """The five results of the kernels, streams first."""
    name = "pre_delayed" if given.sublayer_out is None else "post_pre_delayed"
    args, kwargs = arguments(name, given)
    return call(functools.partial(getattr(ops, name), backend(config)), args, kwargs)


def fits(config, hidden_size):
    return config.block_h <= hidden_size and hidden_size % config.block_h == 0


@pytest.mark.parametrize("tiles", [0, 1])
@pytest.mark.parametrize("edge", EDGES)
def test_configuration(seed, edge, tiles):
    config = dataclasses.replace(PLAIN, **EDGES[edge])
    tokens = tiles * config.block_t + 1  # the last tile has one token
    given = make_inputs(tokens, 384, seed=seed, hc_scale=10, sinkhorn_repeat=2)
    allocated = 6 + config.pack + (not config.fused)
    with canary.allocations(at_least=allocated):
        results = seam(config, given)
    assert_accurate(given, results)


def shipped():
    """Every shipped row once, whatever tells two rows apart for the interpreter."""
    seen = {}
    for name in configs.architectures():
        for hidden_size in (4096, 5120, 7168):
            for row in configs.rows(name, hidden_size):
                blank = {"max_tokens": None, "warps": 4, "row_warps": 4, "gate_warps": 4}
                blank |= {"stages": 1, "fence": False, "why": ""}
                seen.setdefault(dataclasses.replace(row, **blank), f"{name}-{row.max_tokens}")
    return [pytest.param(row, id=name) for row, name in seen.items()]


@pytest.mark.parametrize("config", shipped())
def test_shipped_configuration(seed, config):
    hidden_size = 256 if fits(config, 256) else 4 * config.block_h
    given = make_inputs(3, hidden_size, seed=seed, hc_scale=10, sinkhorn_repeat=FEW)
    with canary.allocations(at_least=6):
        results = seam(config, given)
    assert_accurate(given, results)


@pytest.mark.parametrize("post", [True, False], ids=["post", "no_post"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("optional", OPTIONAL, ids=label)
def test_optional_inputs(seed, optional, pack, post):
    given = make_inputs(5, 256, seed=seed, sinkhorn_repeat=FEW, **optional)
    given = given if post else without_post(given)
    with canary.allocations(at_least=(6 if post else 5) + pack):
        results = seam(dataclasses.replace(PLAIN, pack=pack), given)
    assert_accurate(given, results)


@pytest.mark.parametrize(
    ("tokens", "hidden_size"), [(1, 128), (2, 128), (15, 128), (16, 128), (65, 128), (17, 640)]
)
def test_tokens_around_the_tiles(seed, tokens, hidden_size):
    given = make_inputs(tokens, hidden_size, seed=seed, sinkhorn_repeat=FEW)
    with canary.allocations(at_least=6):
        results = seam(PLAIN, given)
    assert_accurate(given, results)


@pytest.mark.parametrize("repeat", [1, 20])
@pytest.mark.parametrize("hc_scale", [1, 30])
def test_gate_scales_and_iterations(seed, repeat, hc_scale):
    given = make_inputs(17, 256, seed=seed, hc_scale=hc_scale, sinkhorn_repeat=repeat)
    assert_accurate(given, seam(PLAIN, given))


def test_every_eps_where_it_belongs(seed):
    """Of a size that shows: at 1e-6 an eps outside its root hardly does."""
    given = make_inputs(17, 256, seed=seed, sinkhorn_repeat=FEW)
    given = given._replace(rms_eps=0.3, hc_pre_eps=0.05, hc_sinkhorn_eps=0.02, norm_eps=0.4)
    assert_accurate(given, seam(PLAIN, given))


@pytest.mark.parametrize("factor", [50, 1e4])
def test_huge_comb_logits(seed, factor):
    given = make_inputs(17, 128, seed=seed)
    base = given.hc_base.clone()
    base[8:] *= factor
    given = given._replace(hc_base=base)
    results = seam(PLAIN, given)
    assert all(r.isfinite().all() for r in results)
    assert_accurate(given, results)


@pytest.mark.parametrize("fused", [True, False])
def test_in_place(seed, fused):
    """The projection does not read streams that a row program has replaced already."""
    config = dataclasses.replace(PLAIN, fused=fused)
    given = make_inputs(17, 256, seed=seed, sinkhorn_repeat=FEW)
    wanted = seam(config, given)
    buffers = []
    inside = given._replace(residual=canary.copy(given.residual, buffers))
    results = ops.post_pre_delayed_(backend(config), *inside)
    assert_same_bits((inside.residual, *results), wanted)
    canary.check(buffers)


def test_pre_delayed_is_the_rest(seed):
    given = make_inputs(17, 256, seed=seed, sinkhorn_repeat=FEW)
    whole = seam(PLAIN, given)
    rest = judged("pre_delayed", given._replace(residual=whole[0]))
    assert_same_bits(seam(PLAIN, rest), whole)


def test_a_permutation_moves_streams(seed):
    given = make_inputs(17, 256, seed=seed, sinkhorn_repeat=1)
    comb = torch.roll(torch.eye(4), 1, dims=1).expand(17, 4, 4)
    given = given._replace(comb_res_mix=comb, post_layer_mix=torch.zeros(17, 4))
    assert torch.equal(seam(PLAIN, given)[0], torch.roll(given.residual, 1, dims=1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(seed, value):
    given = make_inputs(17, 128, seed=seed, sinkhorn_repeat=FEW)
    wanted = seam(PLAIN, given)
    residual = given.residual.clone()
    residual[3] = value
    got = seam(PLAIN, given._replace(residual=residual))
    others = [t for t in range(17) if t != 3]
    assert_same_bits([g[others] for g in got], [w[others] for w in wanted])
    assert all(not g[3].isfinite().any() for g in got)


@pytest.mark.parametrize(("pack", "repeats"), [(False, 5), (True, 2)], ids=["plain", "packed"])
def test_repeats_give_the_same_bits(seed, pack, repeats):
    """Over NaN in every workspace. What only a GPU can show of this is in test_gpu.py."""
    given = make_inputs(2, 128, seed=seed, sinkhorn_repeat=1, norm_dtype=None)
    config = dataclasses.replace(PLAIN, pack=pack, cols=128, block_h=128)
    wanted = seam(config, given)
    for _ in range(repeats):
        with canary.allocations(at_least=6):
            results = seam(config, given)
        assert_same_bits(results, wanted)


def test_packing_loses_nothing(seed):
    """hi + mid + lo is fn exactly."""
    given = make_inputs(1, 128, seed=seed)
    config = dataclasses.replace(PLAIN, pack=True)
    packed = []

    def run(given, made):
        pack, *_ = launch.plan(config, "", given, made)
        launch.start(pack)
        packed.append(pack.args[1].double())

    ops.post_pre_delayed(run, *given)
    first, last = packed[0][:48].view(3, 16, -1), packed[0][48:].view(3, 8, -1)
    assert torch.equal(torch.cat((first.sum(0), last.sum(0))), given.fn.double())


def test_no_tokens_launch_nothing(monkeypatch):
    monkeypatch.setattr(launch, "plan", None)  # not callable
    results = ops.post_pre_delayed(launch.run, *make_inputs(0, 128))
    assert results[0].shape == (0, 4, 128)
