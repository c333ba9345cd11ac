"""The benchmarks' baseline computes what the operator computes."""

import aot
import pytest
import unfused

from mhc_ops.testing import assert_accurate, make_inputs
from mhc_ops.warmup import single_token_calls


def label(chain):
    return str(chain.max_tokens)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # unused columns of a workspace
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("chain", unfused.TABLE, ids=label)
def test_accuracy(seed, chain):
    import bf16_interpreter  # noqa: F401  before any kernel runs
    import canary

    given = make_inputs(5, 256, seed=seed, hc_scale=10, sinkhorn_repeat=3)
    with canary.allocations(at_least=7):
        outputs = unfused.run(given, chain, vendor="")
    assert_accurate(given, outputs)


@pytest.mark.aot
@pytest.mark.parametrize("chain", unfused.TABLE, ids=label)
def test_compiles_without_spills(chain):
    (given, made) = single_token_calls(5120, "meta", ["post_pre_delayed"])[-1]
    _, limit = aot.TARGETS["sm_90"]
    for name, step in unfused.plan(chain, "nvidia", given, made):
        kernel = aot.compile_step(step, "sm_90")
        assert kernel.spills == 0, f"{name} spills {kernel.spills} (of {kernel.registers})"
        assert kernel.shared <= limit, f"{name} takes {kernel.shared} bytes of shared memory"


def test_table_holds_every_t():
    limits = [row.max_tokens for row in unfused.TABLE]
    assert limits[-1] is None
    assert limits[:-1] == sorted(limits[:-1])
    assert unfused.lookup(1) is unfused.TABLE[0]
    assert unfused.lookup(10**6) is unfused.TABLE[-1]
