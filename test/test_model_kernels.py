"""The kernels of the operators around the whole seam, under Triton's interpreter."""

import dataclasses
import functools

import bf16_interpreter  # noqa: F401  before any kernel runs
import canary
import numpy as np
import pytest
import torch
import triton.language as tl
from cases import assert_same_bits, label, map_tokens
from model_cases import GATES, MODEL_OPERATORS, OPTIONAL_OF, judged, results
from test_kernels import FEW, PLAIN, backend, pytestmark, shipped  # noqa: F401  marks these too
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from mhc_ops import launch, ops
from mhc_ops.testing import assert_accurate, make_inputs

# Outputs and workspaces of each operator; packing fn needs one more.
ALLOCATED = dict(zip(MODEL_OPERATORS, (7, 7, 6, 1, 2, 4, 2), strict=True))
PACKS = ("post_pre_delayed_aux", "post_pre_delayed_quant", "expand_pre_delayed", "gates")


def run(name, config, given):
    return results(name, functools.partial(getattr(ops, name), backend(config)), given)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(
    ("name", "optional"), OPTIONAL_OF, ids=lambda v: v if isinstance(v, str) else label(v)
)
def test_optional_inputs(seed, name, optional, pack):
    given = make_inputs(5, 256, seed=seed, sinkhorn_repeat=FEW, **optional)
    with canary.allocations(at_least=ALLOCATED[name] + (pack and name in PACKS)):
        made = run(name, dataclasses.replace(PLAIN, pack=pack), given)
    assert_accurate(*judged(name, given, made))


@pytest.mark.parametrize("name", MODEL_OPERATORS)
@pytest.mark.parametrize("tokens", [1, 17, 33])
def test_tokens_around_the_tiles(seed, name, tokens):
    """H = 384: a column block of pack.py narrower than 2048, and splits of unequal size."""
    config = dataclasses.replace(PLAIN, pack=tokens == 17, cols=256)
    given = make_inputs(tokens, 384, seed=seed, hc_scale=10, sinkhorn_repeat=FEW)
    with canary.allocations(at_least=ALLOCATED[name]):
        made = run(name, config, given)
    assert_accurate(*judged(name, given, made))


@pytest.mark.parametrize("config", shipped())
def test_the_parts_are_the_whole(seed, config):
    given = make_inputs(17, max(256, 2 * config.block_h), seed=seed, sinkhorn_repeat=FEW)
    whole = run("post_pre_delayed_aux", config, given)
    streams = run("post", config, given).residual_out
    collapse = run("post_collapse", config, given)
    mixed = given._replace(residual=streams)
    rest = run("pre_delayed", config, mixed)
    for got in (streams, collapse.residual_out):
        assert_same_bits((got,), (whole.residual_out,))
    for got in (collapse, rest):
        assert_same_bits((got.layer_input,), (whole.layer_input,))
    for got in (run("gates", config, mixed), rest):
        for gate in GATES:
            wanted = getattr(whole, gate)
            torch.testing.assert_close(getattr(got, gate), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("post", ["seam_kernel"]),
        ("post_collapse", ["seam_kernel"]),
        ("gates", ["pack_kernel", "gemm_kernel", "gates_kernel"]),
        ("post_pre_delayed_aux", ["seam_kernel", "gemm_kernel", "gates_kernel"]),  # packs, too
    ],
)
def test_nothing_is_launched_in_vain(name, kernels):
    seen = []

    def record(given, made):
        config = dataclasses.replace(PLAIN, fused=False, pack=True)
        seen.extend(step.kernel.fn.__name__ for step in launch.plan(config, "", given, made))

    results(name, functools.partial(getattr(ops, name), record), make_inputs(1, 128))
    assert seen == kernels


def run_last_programs(monkeypatch, step):
    """Of a launch only the programs of the last tokens: all of them would take days."""
    programs = step.grid[0]
    if step.kernel.fn.__name__ == "pack_kernel":
        ids = range(programs)
    else:
        named = dict(zip(step.kernel.arg_names, step.args, strict=False))
        projecting = named.get("project_programs", programs)
        splits = step.constants["SPLITS"]
        packing = named["T"] if named.get("packed") is not None else programs  # from here on
        ids = {*range(max(0, projecting - 2 * splits), projecting), *range(packing - 3, programs)}
        ids = sorted(ids)

    def program_id(self, axis):
        at = self.grid_idx[axis]
        return TensorHandle(np.array([at if axis else ids[at]], dtype=np.int32), tl.int32)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_get_program_id", program_id)
        launch.start(step._replace(grid=(len(ids), *step.grid[1:])))


HUGE = {
    "fused": {},
    "unfused": {"fused": False, "pack": True},
    "few tokens": {"block_t": 2, "cols": 64},
}


@pytest.mark.parametrize("edge", HUGE)
@pytest.mark.parametrize(
    "name", ["post_pre_delayed_aux", "post_pre_delayed_quant", "expand_pre_delayed"]
)
def test_offsets_past_32_bits(monkeypatch, seed, name, edge):
    """The last three of 2^27 + 3 tokens have the bits of the three alone: every tensor that grows
    with T has more than 2^31 elements."""
    config = dataclasses.replace(PLAIN, gate_t=4, **HUGE[edge])
    last = make_inputs(3, 128, seed=seed, sinkhorn_repeat=FEW)
    tokens = 2**27 + 3

    def huge(tensor):
        made = canary.reserved((tokens, *tensor.shape[1:]), tensor.dtype)
        made[-3:] = tensor
        return made

    given = map_tokens(huge, last)
    assert given.comb_res_mix.numel() > 2**31

    def launches(given, made):
        for step in launch.plan(config, "", given, made):
            run_last_programs(monkeypatch, step)

    with canary.allocated_by(canary.reserved):
        got = results(name, functools.partial(getattr(ops, name), launches), given)
    wanted = run(name, config, last)
    made = [(g, w) for g, w in zip(got, wanted, strict=True) if w is not None]
    assert_same_bits([g[-3:] for g, _ in made], [w for _, w in made])
