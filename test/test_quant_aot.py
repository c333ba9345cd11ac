"""The quantising row programs, compiled for every chip that has OCP e4m3."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import aot
import pytest

from mhc_ops import configs, launch
from mhc_ops.warmup import single_token_calls

pytestmark = pytest.mark.aot

HIDDEN_SIZE = 5120
CONVERTS = {
    "nvidia": r"\bcvt\.rn\.satfinite\.e4m3x2\.f32\b",
    "amd": r"\bv_cvt_(scalef32_)?pk_fp8_f32\b",
}
CHIPS = ("sm_90", "sm_100", "sm_120", "gfx950")
CASES = [(chip, index) for chip in CHIPS for index in (0, -1)]  # fewest and most tokens


def rows_step(operator, chip, index, call):
    """The launch with the row programs."""
    config = configs.rows(chip, HIDDEN_SIZE)[index]
    given, made = single_token_calls(HIDDEN_SIZE, "meta", [operator])[call]
    steps = launch.plan(config, aot.vendor(chip), given, made)
    return next(s for s in steps if s.kernel.__name__ == "seam_kernel")


def compile_rows(operator, chip, index, call):
    return aot.compile_step(rows_step(operator, chip, index, call), chip)


@pytest.fixture(scope="module")
def compiled():
    """Compiles in a process of its own: in one that has compiled for a gfx942, triton 3.6.0 goes on
    converting to e4m3 without the instruction that only a gfx950 has."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield lambda *job: pool.submit(compile_rows, *job).result()


@pytest.mark.parametrize(("chip", "index"), CASES)
@pytest.mark.parametrize("ue8m0", [True, False], ids=["ue8m0", "fp32"])
def test_compiles_well(compiled, chip, index, ue8m0):
    kernel = compiled("post_pre_delayed_quant", chip, index, -2 if ue8m0 else -1)
    _, limit = aot.TARGETS[chip]
    assert kernel.spills == 0
    assert kernel.shared <= limit
    vendor = aot.vendor(chip)
    assert re.search(CONVERTS[vendor], kernel.assembly)
    if vendor == "nvidia" and not ue8m0:  # s = a / 448 as IEEE has it
        assert re.search(r"\bdiv\.rn\.f32\b", kernel.assembly)


REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?\) <\{axis = 0 : i32\}>.*?\}\) : \(tensor<(\d+)xf32, (.*?)>\) -> f32',
    re.DOTALL,
)


@pytest.mark.parametrize(("chip", "index"), CASES)
def test_the_collapse_sums_in_one_order(compiled, chip, index):
    """The bits of the seam, then the quantiser: u^2 must be added up as post_pre_delayed does."""

    def layouts(operator, call):
        ir = compiled(operator, chip, index, call).ir
        aliases = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
        return [
            (size, re.sub(r"#\w+", lambda m: aliases.get(m[0], m[0]), layout))
            for size, layout in REDUCTION.findall(ir)
        ]

    wanted = layouts("post_pre_delayed", -1)
    assert wanted
    for call in (-2, -1):
        assert layouts("post_pre_delayed_quant", call) == wanted
