"""The GPU backend beyond what `device` tests show: every T, every configuration, huge T."""

import dataclasses

import canary
import pytest
import torch
from cases import (
    OPERATORS,
    POST_INPUTS,
    assert_same_bits,
    judged,
    map_tokens,
    repeated,
    seam,
    without_post,
)

import mhc_ops
from mhc_ops import configs, launch, ops, outputs, reference
from mhc_ops.testing import assert_accurate, make_inputs

pytestmark = pytest.mark.gpu
H = 5120


def rows_of(given, rows):
    """`given` with some of its tokens."""
    return map_tokens(lambda tensor: tensor[rows].contiguous(), given)


def forced(config, given):
    """The seam with a configuration that its T would not choose."""

    def run(given, made):
        launch.run_with(config, launch.vendor(), given, made)

    return tuple(ops.post_pre_delayed(run, *given))


def shipped():
    """Every row that this GPU may use, by its place: reading the files needs no GPU."""
    names = {"sm_90": H} if not torch.cuda.is_available() else {launch.architecture(0): H}
    return [
        pytest.param(row, id=f"{name}-{row.max_tokens}")
        for name, hidden_size in names.items()
        for row in configs.rows(name, hidden_size)
    ]


def test_every_T_to_130_inside_canaries(seed):
    """More than two tiles of every kind; nothing is written past an output or a workspace."""
    everything = make_inputs(130, 640, seed=seed, device="cuda")
    for tokens in range(1, 131):
        given = rows_of(everything, slice(tokens))
        with canary.allocations(at_least=6):
            results = seam("post_pre_delayed", given)
        assert_accurate(given, results)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tokens", [1, 17, 130, 400, 2100, 8200])
def test_canaries_of_every_operator(seed, name, tokens):
    given = make_inputs(tokens, 256, seed=seed, device="cuda")
    at_least = 6 if name == "post_pre_delayed" else 5
    with canary.allocations(at_least=at_least):
        results = seam(name, given)
    assert_accurate(judged(name, given), results)


@pytest.mark.parametrize("name", ["post_pre_delayed_", "post_pre_delayed_out"])
@pytest.mark.parametrize("tokens", [1, 17, 65, 2100])
def test_canaries_around_the_streams_of_the_caller(seed, name, tokens):
    given = make_inputs(tokens, 256, seed=seed, device="cuda")
    wanted = seam("post_pre_delayed", given)
    buffers = []
    streams = canary.copy(given.residual, buffers)
    if name.endswith("_out"):
        results = torch.ops.mhc.post_pre_delayed_out(*given, residual_out=streams)
    else:
        results = torch.ops.mhc.post_pre_delayed_(streams, *given[1:])
    assert_same_bits((streams, *results), wanted)
    canary.check(buffers)


@pytest.mark.parametrize("value", [float("nan"), 3e38, -1.0])
def test_what_was_in_memory_before_does_not_matter(seed, value):
    """The caching allocator hands out blocks that others used: fill them with garbage first."""
    given = make_inputs(65, H, seed=seed, device="cuda")
    wanted = seam("post_pre_delayed", given)
    for _ in range(20):
        sizes = [2**n for n in range(7, 24)]
        blocks = [torch.full((size,), value, device="cuda") for size in sizes]
        del blocks
        assert_same_bits(seam("post_pre_delayed", given), wanted)


@pytest.mark.parametrize("config", shipped())
def test_shipped_configuration(seed, config):
    """Whatever T it is meant for, it is right at the edges of its tiles, and bit-stable."""
    for tokens in (1, config.block_t, 2 * config.block_t + 1, 200):
        given = make_inputs(tokens, H, seed=seed + tokens, device="cuda", hc_scale=10)
        assert_accurate(given, forced(config, given))
    wanted = forced(config, given)
    for _ in range(100):
        assert_same_bits(forced(config, given), wanted)


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_warp_counts(seed, warps, row):
    """A sum over a part of the lanes may be right for one count only."""
    config = configs.rows(launch.architecture(0), 640)[row]
    counts = {"warps": warps, "row_warps": warps, "gate_warps": warps}
    config = dataclasses.replace(config, row_block=256, **counts)
    for tokens in (1, 65):
        given = make_inputs(tokens, 640, seed=seed, device="cuda")
        assert_accurate(given, forced(config, given))


@pytest.mark.parametrize("hidden_size", [128, 384, 4096, 7168])
@pytest.mark.parametrize("tokens", [1, 64, 192, 768, 4096])
def test_other_hidden_sizes(seed, hidden_size, tokens):
    given = make_inputs(tokens, hidden_size, seed=seed, device="cuda", hc_scale=30)
    assert_accurate(given, seam("post_pre_delayed", given))


@pytest.mark.parametrize("tokens", [512, 1024, 2048, 8192])
def test_fused_against_composed(seed, tokens):
    """The steps as separate PyTorch operators on the GPU share no kernel with the fused seam."""
    given = make_inputs(tokens, H, seed=seed, device="cuda")
    streams, *fused = seam("post_pre_delayed", given)
    assert_accurate(given, (streams, *fused))
    composed = ops.post_pre_delayed(reference.run, *given)
    assert (streams != composed[0]).double().mean() < 1e-4
    # The rest from the same R': one flipped bit of a large R' moves a gate by 1e-4.
    rest = without_post(given)._asdict() | {"residual": streams}
    for name in POST_INPUTS:
        del rest[name]
    for a, b in zip(fused, ops.pre_delayed(reference.run, **rest), strict=True):
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=0, atol=4e-5)
        else:  # now and then the next bf16, twice in a row
            assert (a != b).double().mean() < 1e-2
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-10)


def test_offsets_past_32_bits(seed):
    """T * 4 * H is 2.25e9: a 32-bit offset wraps."""
    tokens, last = 110_000, 64
    given = make_inputs(last, H, seed=seed, device="cuda")
    many = repeated(given, tokens)
    assert many.residual.numel() > 2**31
    results = torch.ops.mhc.post_pre_delayed(*many)
    config = configs.lookup(launch.architecture(0), H, tokens)
    alone = forced(config, given)
    assert_same_bits([r[-last:] for r in results], alone)
    assert_accurate(given, alone)


def test_batch_invariance_within_a_configuration(seed):
    """A token's bits do not depend on its neighbours, as long as T picks the same row."""
    rows = configs.rows(launch.architecture(0), H)
    for row in rows[:4]:
        given = make_inputs(100, H, seed=seed, device="cuda")
        whole = forced(row, given)
        part = forced(row, rows_of(given, slice(37, 70)))
        assert_same_bits(part, [w[37:70] for w in whole])


@pytest.fixture
def batch_invariant():
    mhc_ops.set_batch_invariant()
    yield
    mhc_ops.set_batch_invariant(False)


@pytest.mark.parametrize("name", OPERATORS)
def test_batch_invariance(seed, batch_invariant, name):
    """Switched on, among any T at most 2,048 a token has the bits that it has among 2,048."""
    most = make_inputs(2048, H, seed=seed, device="cuda")
    wanted = seam(name, most)
    for tokens in (*range(1, 34), 63, 64, 65, 127, 129, 192, 255, 384, 385, 513, 1000, 1025, 2047):
        got = seam(name, rows_of(most, slice(2048 - tokens, None)))
        assert_same_bits(got, [w[-tokens:] for w in wanted])


def test_batch_variance(seed):
    """What the switch is for: without it the test above would fail."""
    most = make_inputs(2048, H, seed=seed, device="cuda")
    whole, part = (seam("post_pre_delayed", rows_of(most, slice(n))) for n in (2048, 16))
    assert any(not torch.equal(w[:16], p) for w, p in zip(whole, part, strict=True))


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_dependent_launches_wait(seed, tokens):
    """Seams in a row, each from what the one before made, after a slow producer of everything."""
    given = make_inputs(tokens, H, seed=seed, device="cuda")
    config = configs.lookup(launch.architecture(0), H, tokens)

    def chain(config, given):
        made = []
        for _ in range(4):
            streams, post_mix, comb_mix, layer_input, pre_mix = forced(config, given)
            made += [streams, post_mix, comb_mix, layer_input, pre_mix]
            given = given._replace(
                residual=streams, sublayer_out=layer_input, post_layer_mix=post_mix,
                comb_res_mix=comb_mix, pre_mix=pre_mix,
            )  # fmt: skip
        return made

    wanted = chain(dataclasses.replace(config, pdl=False), given)
    inputs = given._replace(
        **{k: v.clone() for k, v in given._asdict().items() if isinstance(v, torch.Tensor)}
    )
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for into in inputs:
            if isinstance(into, torch.Tensor):
                into.fill_(torch.nan)
        torch.cuda._sleep(20_000)
        for into, value in zip(inputs, given, strict=True):
            if isinstance(into, torch.Tensor):
                into.copy_(value)
        for a, b in zip(chain(config, inputs), wanted, strict=True):
            wrong += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
    assert wrong == 0


def test_pre_delayed_on_given_streams(seed):
    given = make_inputs(65, H, seed=seed, device="cuda")
    whole = seam("post_pre_delayed", given)
    rest = given._replace(residual=whole[0])
    assert_accurate(judged("pre_delayed", rest), seam("pre_delayed", rest))


def test_outputs_of_the_package_are_where_the_input_is():
    given = make_inputs(3, 256, device="cuda")
    assert all(r.device == given.residual.device for r in seam("post_pre_delayed", given))
    assert outputs.streams(given.residual).device == given.residual.device


def test_tensors_on_a_device_that_is_not_current(seed):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = make_inputs(65, 256, seed=seed, device="cuda:1")
    with torch.cuda.device(0):
        results = seam("post_pre_delayed", given)
        assert torch.cuda.current_device() == 0
    assert all(r.device.index == 1 for r in results)
    assert_accurate(given, results)
