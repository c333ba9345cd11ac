"""Every kernel compiles well for every chip: no spills, little shared memory, matrix units used."""

import ast
import dataclasses
import multiprocessing
import os
import pathlib
import re
from concurrent.futures import ProcessPoolExecutor

import aot
import pytest

import mhc_ops.kernels
from mhc_ops import configs, launch
from mhc_ops.warmup import single_token_calls

pytestmark = pytest.mark.aot

HIDDEN_SIZES = (5120, 4096)
KERNELS = pathlib.Path(mhc_ops.kernels.__path__[0])


def shipped():
    """(architecture, H, row) of every distinct way in which a chip's kernels are compiled."""
    found = {}
    for name in aot.TARGETS:
        for hidden_size in HIDDEN_SIZES:
            for index, row in enumerate(configs.rows(name, hidden_size)):
                key = name, dataclasses.replace(row, max_tokens=None, why="")
                found.setdefault(key, (name, hidden_size, index))
    return list(found.values())


def combinations(hidden_size):
    return single_token_calls(hidden_size, "meta", ("pre_delayed", "post_pre_delayed"))


def compile_all(architecture, hidden_size, index, combination):
    """[(kernel name, Compiled)] of one call, in order. Runs in another process."""
    config = configs.rows(architecture, hidden_size)[index]
    given, made = combinations(hidden_size)[combination]
    return [
        (step.kernel.__name__, aot.compile_step(step, architecture))
        for step in launch.plan(config, aot.vendor(architecture), given, made)
    ]


ALL_GIVEN = len(combinations(128)) - 1  # the last has every optional input
JOBS = [(*case, ALL_GIVEN) for case in shipped()]
# The rows for the most tokens, which pack fn, and for the fewest, without each optional input.
JOBS_OPTIONAL = [
    (name, 5120, index, combination)
    for name, index in (("sm_90", len(configs.rows("sm_90", 5120)) - 1), ("gfx942", 0))
    for combination in range(ALL_GIVEN)
]


@pytest.fixture(scope="module")
def compiled(request):
    """Gives what compile_all returned; other processes work ahead through the collected tests."""
    parametrised = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    jobs = [params["job"] for params in parametrised if "job" in params]
    # A fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count(), 8), mp_context=context) as pool:
        futures = {job: pool.submit(compile_all, *job) for job in jobs}
        yield lambda job: futures[job].result()
        pool.shutdown(cancel_futures=True)


def label(job):
    architecture, hidden_size, index, combination = job
    limit = configs.rows(architecture, hidden_size)[index].max_tokens
    return f"{architecture}-{hidden_size}-{limit}-{combination}"


@pytest.mark.parametrize("job", JOBS, ids=label)
def test_shipped_configuration(compiled, job):
    architecture, *_ = job
    _, limit = aot.TARGETS[architecture]
    kernels = compiled(job)
    assert {"seam_kernel", "gates_kernel"} <= {name for name, _ in kernels}
    for name, kernel in kernels:
        assert kernel.spills == 0, (
            f"{name} spills {kernel.spills} (of {kernel.registers} registers)"
        )
        assert kernel.shared <= limit, f"{name} takes {kernel.shared} bytes of shared memory"
    config = configs.rows(*job[:2])[job[2]]
    assert [name for name, _ in kernels[-2:]] == [
        "seam_kernel" if config.fused else "gemm_kernel", "gates_kernel",
    ]  # fmt: skip
    projection = kernels[-2][1].assembly
    assert bool(aot.MATRIX_INSTRUCTION.search(projection)) == (config.block_t >= 16)


@pytest.mark.parametrize("job", JOBS_OPTIONAL, ids=label)
def test_optional_inputs(compiled, job):
    for name, kernel in compiled(job):
        assert kernel.spills == 0, name


DEPENDENT = [i for i, row in enumerate(configs.rows("sm_90", 5120)) if row.pdl]


@pytest.mark.parametrize("index", DEPENDENT)
@pytest.mark.parametrize("operator", ["post_collapse", "gates"])
def test_nothing_is_touched_before_the_kernel_before_has_ended(operator, index):
    """One program a kernel, so that the text is in the order of execution; only prefetches may
    come before the wait."""
    config = configs.rows("sm_90", 5120)[index]
    given, made = single_token_calls(5120, "meta", [operator])[-1]
    for step in launch.plan(config, "nvidia", given, made):
        assert step.options["launch_pdl"]
        before, after = aot.compile_step(step, "sm_90").assembly.split("griddepcontrol.wait;")
        touches = re.compile(r"^\s*(@\S+ )?(ld|st|atom|red|cp)\.(global|async)", re.MULTILINE)
        assert not touches.search(before)
        assert touches.search(after)


SOURCES = sorted(KERNELS.glob("*.py"))


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_import_triton_only(path):
    found = set(imports(ast.parse(path.read_text())))
    assert found <= {"triton", "triton.language"}


# Vendor modules, what newer Triton removed or will, tuning while serving.
BANNED = re.compile(
    r"tl\.extra\.(cuda|hip)|triton\.language\.(cuda|hip)|tl\.math\.|tl\.libdevice|allow_tf32"
    r"|make_block_ptr|tl\.advance|experimental_(descriptor|device_tensormap)|debug_barrier"
    r"|autotune|heuristics|tl\.inline_ptx|__version__"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_use_nothing_removed_or_vendor_only(path):
    assert not BANNED.findall(path.read_text())


@pytest.mark.parametrize(
    "path", sorted(KERNELS.parent.rglob("*.py")), ids=lambda p: str(p.relative_to(KERNELS.parent))
)
def test_features_are_probed_and_nothing_tunes_itself(path):
    """Two builds may have one version string. The package's own version is for printing."""
    text = path.read_text()
    assert "autotune" not in text
    assert not re.search(r"__version__[\w.()\[\]\"']*\s*(<|>|==|!=)", text)
    assert not re.search(r"\b(parse_version|Version)\(", text)


def test_T_is_never_a_constant():
    """Each token count would compile anew while serving."""
    given, made = combinations(5120)[ALL_GIVEN]
    for row in configs.rows("default", 5120):
        for step in launch.plan(row, "nvidia", given, made):
            assert "T" not in step.constants
            assert {"T", "gate_programs"} & set(step.kernel.arg_names) <= {
                step.kernel.arg_names[i] for i in range(len(step.args))
            }
            for name in ("T", "gate_programs", "sinkhorn_repeat"):
                if name in step.kernel.arg_names:
                    assert name in step.kernel.do_not_specialize
