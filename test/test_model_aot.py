"""The operators around the whole seam, compiled for a chip of each vendor."""

import re

import aot
import pytest
from model_cases import MODEL_OPERATORS
from test_aot import shipped

from mhc_ops import configs, launch
from mhc_ops.warmup import single_token_calls

pytestmark = pytest.mark.aot


def steps(operator, architecture, hidden_size, index):
    """The launches of an operator with every optional input."""
    config = configs.rows(architecture, hidden_size)[index]
    given, made = single_token_calls(hidden_size, "meta", [operator])[-1]
    return list(launch.plan(config, aot.vendor(architecture), given, made))


def ends(architecture):
    """A chip's rows for the fewest and the most tokens."""
    cases = [case for case in shipped() if case[0] == architecture]
    return [cases[0], cases[-1]]


# All 28 rows of every chip, which test_aot.py compiles for the whole seam, would take 15 minutes.
CASES = [*ends("sm_90"), *ends("gfx942")]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


@every_case
@pytest.mark.parametrize("operator", MODEL_OPERATORS)
def test_shipped_configuration(operator, case):
    architecture = case[0]
    _, limit = aot.TARGETS[architecture]
    for step in steps(operator, *case):
        kernel = aot.compile_step(step, architecture)
        name = step.kernel.__name__
        assert kernel.spills == 0, (
            f"{name} spills {kernel.spills} (of {kernel.registers} registers)"
        )
        assert kernel.shared <= limit, f"{name} takes {kernel.shared} bytes of shared memory"


REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?\) <\{axis = 0 : i32\}>.*?\}\) : \(tensor<(\d+)xf32, (.*?)>\) -> ', re.DOTALL
)


def order_of_collapse_sum(operator, case):
    """{(layout, warps)} of the sums over a row, sum(u^2) among them."""
    orders = set()
    for step in steps(operator, *case):
        if step.kernel.__name__ != "seam_kernel":
            continue
        ir = aot.compile_step(step, case[0]).ir
        aliases = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
        for size, layout in REDUCTION.findall(ir):
            if size == str(step.constants["ROW_BLOCK"]):
                layout = re.sub(r"#\w+", lambda m, a=aliases: a.get(m[0], m[0]), layout)
                orders.add((layout, step.options["num_warps"]))
    return orders


@every_case
def test_the_collapse_sums_in_one_order(case):
    """Operators compiled apart give one layer_input, bit for bit, on chips that are not here too:
    a square of a bf16 is exact in fp32, so only the order of sum(u^2) could tell them apart."""
    wanted = order_of_collapse_sum("post_pre_delayed", case)
    assert len(wanted) == 1
    for operator in ("post_pre_delayed_aux", "pre_delayed", "post_collapse"):
        assert order_of_collapse_sum(operator, case) == wanted, operator
