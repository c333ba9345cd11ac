"""The C++ library of schemas and Meta kernels: builds, loads in any order, says what Python says."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import operator
from filelock import FileLock
from meta_cases import (
    OPERATORS,
    H,
    T,
    example,
    good_calls,
    missing,
    other_faults,
    quantising_faults,
    several_faults,
    single_faults,
    tensors,
)

import mhc_ops
from mhc_ops import meta_library
from mhc_ops.testing import make_inputs

ROOT = pathlib.Path(__file__).parents[1]
TEST = ROOT / "test"
NAME = meta_library.file_name(torch.__version__)

if shutil.which("g++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


def python(*arguments, path=(), check=True, **options):
    """Run this Python with `path` ahead on its module path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "CI": "1"}
    environment.update(options.pop("env", {}))
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0 or not check, done.stderr
    return done


def pip_install(source, target, **environment):
    """`pip install` of a copy of the sources, so that nothing is built in the checkout."""
    if not source.exists():
        source.mkdir()
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        for name in ("mhc_ops", "csrc_meta"):
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    options = ("--no-build-isolation", "--no-deps", "--upgrade", "--target", target)
    command = ("-m", "pip", "install", "-q", *options, source)
    return python(*command, cwd=source, check=False, env=environment)


def once(tmp_path_factory, name, build):
    """A folder that one process of the test run builds for all."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / name
    with FileLock(root / f"{name}.lock"):
        if not (folder / "done").exists():
            folder.mkdir()
            build(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The package as installed with its library."""

    def build(folder):
        done = pip_install(folder / "source", folder / "target", MHC_BUILD_META="1")
        assert done.returncode == 0, done.stdout + done.stderr

    return once(tmp_path_factory, "installed", build) / "target"


@pytest.fixture(scope="session")
def library(installed):
    return installed / "mhc_ops" / NAME


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The build folder of test/server."""
    beside = pathlib.Path(sys.executable).parent
    cmake = shutil.which("cmake", path=os.pathsep.join([str(beside), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip("needs cmake")

    def build(folder):
        configure = [cmake, "-S", TEST / "server", "-B", folder]
        configure += [f"-DTORCH_ROOT={torch.__path__[0]}", f"-DPython3_EXECUTABLE={sys.executable}"]
        for command in (configure, [cmake, "--build", folder]):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    return once(tmp_path_factory, "server", build)


# Building and installing


def test_library_needs_no_python(library):
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needed
    assert "python3" not in "\n".join(line.split("=>")[0] for line in needed.splitlines())


def test_build_without_a_compiler(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    assert pip_install(source, target).returncode == 0
    failed = pip_install(source, target, MHC_BUILD_META="1", CC="false", CXX="false")
    assert failed.returncode != 0
    lines = [line for line in failed.stderr.splitlines() if "mhc_ops: MHC_BUILD_META=1" in line]
    assert len(lines) == 1
    assert "needs a compiler that knows C++20" in lines[0]
    import_it = "import mhc_ops; print(mhc_ops.__file__)"
    assert str(target) in python("-c", import_it, path=[target], cwd=tmp_path).stdout


# Loading

USE = """
import sys, warnings
import torch
warnings.simplefilter("error")
for step in sys.argv[1:]:
    if step == "mhc_ops":
        import mhc_ops
    else:
        torch.ops.load_library(step)
        torch.ops.load_library(step)
bf16 = {"dtype": torch.bfloat16, "device": "meta"}
x, streams = torch.empty(3, 128, **bf16), torch.empty(3, 4, 128, **bf16)
post, comb = torch.empty(3, 4, device="meta"), torch.empty(3, 4, 4, device="meta")
print(torch.ops.mhc.post.default(streams, x, post, comb).shape)
if "mhc_ops" in sys.argv:  # its CPU kernels are there in any order
    cpu = [torch.zeros_like(t, device="cpu") for t in (streams, x, post, comb)]
    print(mhc_ops.post(*cpu).sum().item())
print(torch._C._dispatch_dump("mhc::post"))
"""
SHAPE = "torch.Size([3, 4, 128])"


@pytest.mark.parametrize("second", ["python", "installed"])
@pytest.mark.parametrize("order", ["library alone", "library, mhc_ops", "mhc_ops, library"])
def test_load_orders(installed, library, tmp_path, order, second):
    """`second`: what mhc_ops is, the checkout without a library or the package with one."""
    steps = [str(library) if step == "library alone" else step for step in order.split(", ")]
    steps = [str(library) if step == "library" else step for step in steps]
    path = installed if second == "installed" else ROOT
    done = python("-c", USE, *steps, path=[path], cwd=tmp_path)
    assert done.stdout.startswith(SHAPE)
    assert "mhc_ops" not in steps or done.stdout.splitlines()[1] == "0.0"
    assert not done.stderr
    # Registered once, by whoever came first.
    first = steps[0] != "mhc_ops" or second == "installed"
    assert ("register.cpp" in done.stdout) == first


def package(folder, installed, *, schema=lambda text: text, name=NAME, content=None):
    """An installed package with another schemas.txt, or another library."""
    shutil.copytree(installed / "mhc_ops", folder / "mhc_ops")
    path = folder / "mhc_ops" / "schemas.txt"
    path.write_text(schema(path.read_text()))
    if content is not None:
        (folder / "mhc_ops" / NAME).write_bytes(content)
    if name != NAME:
        (folder / "mhc_ops" / NAME).rename(folder / "mhc_ops" / name)
    return folder


def refused(folder, code="import mhc_ops", *arguments):
    done = python("-c", code, *arguments, path=[folder], cwd=folder, check=False)
    assert done.returncode == 1, done.stderr  # an exception, not an abort
    return done.stderr.splitlines()[-1]


def test_library_for_another_torch(installed, tmp_path):
    # Not a library at all: it must be refused before anything opens it.
    name = meta_library.file_name("2.3.4+cu999")
    error = refused(package(tmp_path, installed, name=name, content=b"nothing"))
    assert error.startswith("ImportError")
    assert f"built for torch 2.3.4+cu999, but this is torch {torch.__version__}" in error


def test_library_that_does_not_load(installed, tmp_path):
    error = refused(package(tmp_path, installed, content=b"nothing"))
    assert error.startswith("ImportError")
    assert f"{NAME} does not load" in error


CHANGES = {
    "changed": lambda text: text.replace("norm_eps=1e-06", "norm_eps=1e-05"),
    "grown": lambda text: text + "[pt2_compliant_tag] more(Tensor residual) -> Tensor\n",
}


@pytest.mark.parametrize("change", CHANGES)
def test_stale_library(installed, tmp_path, change):
    error = refused(package(tmp_path, installed, schema=CHANGES[change]))
    assert error.startswith("ImportError: mhc_ops: a stale libmhc_meta is loaded")
    assert {"changed": "norm_eps=9.9", "grown": "no mhc::more"}[change] in error


def test_stale_library_before_and_after_python(installed, library, tmp_path):
    folder = package(tmp_path, installed, schema=CHANGES["changed"], name="elsewhere.so")
    before = "import sys, torch; torch.ops.load_library(sys.argv[1]); import mhc_ops"
    assert "a stale libmhc_meta is loaded" in refused(folder, before, library)
    after = "import sys, torch, mhc_ops; torch.ops.load_library(sys.argv[1]); "
    after += "print(torch.ops.mhc.post_pre_delayed.default._schema)"
    done = python("-c", after, library, path=[folder], cwd=folder)
    assert "libmhc_meta is of another version" in done.stderr
    assert "norm_eps=1.0" in done.stdout


# The same as Python, in a process without it


def same(library, calls):
    """What came of the calls, after asserting that it is the same in Python and in C++."""
    calls = list(calls)

    def outcomes(operators):
        script, data = TEST / "meta_calls.py", json.dumps(calls)
        return json.loads(python(script, operators, path=[ROOT], input=data).stdout)

    with ThreadPoolExecutor() as both:
        found, wanted = both.map(outcomes, (library, "mhc_ops"))
    different = [both for both in zip(calls, found, wanted, strict=True) if both[1] != both[2]]
    assert not different, f"{len(different)} of {len(calls)}, first: {different[0]}"
    return found


def test_same_results(library):
    found = same(library, good_calls())
    assert all("results" in outcome for outcome in found)
    assert {name for outcome in found for name in outcome["written"]} == {
        "residual",
        "residual_out",
    }
    # Tensors with a T each are guarded to have the same one, and it stays symbolic.
    assert any(outcome["guards"] for outcome in found)
    assert not any(text.isdigit() for outcome in found for text in outcome["specialised"])


def test_same_errors(library):
    found = same(library, [*single_faults(), *missing(), *quantising_faults()])
    assert all("error" in outcome for outcome in found)
    assert {outcome["error"][0] for outcome in found} == {"ValueError", "TypeError"}


def test_same_error_of_several(library):
    assert all("error" in outcome for outcome in same(library, several_faults()))


def test_same_errors_of_devices_and_gradients(library):
    found = same(library, other_faults())
    assert {outcome["error"][0] for outcome in found} == {"ValueError", "RuntimeError"}


def test_none_for_a_tensor_that_is_not_optional(library):
    """The dispatcher lets it through, as a tensor that is not defined."""
    call = "import sys, torch; torch.ops.load_library(sys.argv[1]); "
    call += "streams = torch.empty(3, 4, 128, dtype=torch.bfloat16, device='meta'); "
    call += "torch.ops.mhc.post(streams, *[None] * 3)"
    done = python("-c", call, library, check=False)
    assert done.stderr.splitlines()[-1] == "ValueError: mhc::post: sublayer_out is missing"


# Compilers, with the library and without

GRAPHS = """
import sys
import torch
if len(sys.argv) > 1:
    torch.ops.load_library(sys.argv[1])
import mhc_ops
from torch._dynamo.utils import counters
from meta_cases import OPERATORS, T, example

class Call(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
    def forward(self, arguments):
        return getattr(torch.ops.mhc, self.op).default(**arguments)

for op in OPERATORS:
    torch._dynamo.reset()
    counters.clear()
    function = torch.compile(Call(op), dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (1, 2, 7, 64):
            function(example(op, tokens))
        tokens = torch.export.Dim("T", min=1)
        arguments = example(op)
        dynamic = {
            k: {0: tokens} if isinstance(v, torch.Tensor) and v.shape[0] == T else None
            for k, v in arguments.items()
        }
        program = torch.export.export(Call(op), (arguments,), dynamic_shapes=(dynamic,))
    print(op, counters["stats"]["unique_graphs"], len(program.graph.nodes), program.range_constraints)
"""


def test_same_graphs(library, tmp_path):
    path = [ROOT, TEST]
    without = python("-c", GRAPHS, path=path, cwd=tmp_path).stdout
    assert without.count("\n") == len(OPERATORS)
    assert python("-c", GRAPHS, library, path=path, cwd=tmp_path).stdout == without


def test_other_tests_with_the_library(library):
    code = "import sys, torch, pytest; torch.ops.load_library(sys.argv[1]); "
    code += "sys.exit(pytest.main(sys.argv[2:]))"
    options = ["-q", "-n0", "-p", "no:cacheprovider"]
    # Of opcheck, the combinations with everything optional given.
    options += ["-k", "not import_is_cheap and not stream0 and not float32 and not None"]
    files = [TEST / f"test_{name}.py" for name in ("schema", "inference_only", "opcheck")]
    python("-c", code, library, *options, *files, path=[ROOT], cwd=ROOT)


# A program without Python


def serve(server, library, *arguments):
    return subprocess.run(
        [server / "server", library, *arguments], capture_output=True, text=True, timeout=60
    )


def shown(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}{list(tensor.stride())}@{tensor.device.type}"


@pytest.mark.parametrize("built_by", ["pip", "cmake"])
def test_server_runs_every_operator_on_meta(server, library, built_by):
    path = library if built_by == "pip" else server / "csrc_meta" / "libmhc_meta.so"
    done = serve(server, path)
    assert done.returncode == 0, done.stderr
    wanted = set()
    for op in OPERATORS:
        arguments = example(op)
        for name in tensors(arguments):
            arguments[name] = arguments[name].to("meta")
        results = operator(op)(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        wanted.add(" ".join([f"mhc::{op}", *map(shown, results)]))
    assert set(done.stdout.splitlines()) == wanted


class Seam(torch.nn.Module):
    def forward(self, residual, fn, sublayer_out, post_layer_mix, comb_res_mix):
        gate = (fn, torch.ones(3), torch.zeros(24), 1e-6, 1e-6, 1e-6, 2.0, 20)
        inputs = (sublayer_out, post_layer_mix, comb_res_mix)
        return mhc_ops.post_pre_delayed(residual * 2, *gate, None, *inputs)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_server_runs_a_package(server, tmp_path):
    """The program brings a kernel that makes the n-th result all n; the package calls it."""
    given = make_inputs(T, H)
    args = (given.residual, given.fn, *given[10:13])
    tokens = torch.export.Dim("T", min=1)
    dynamic = ({0: tokens}, None, {0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(Seam(), args, dynamic_shapes=dynamic)
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "seam.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    done = serve(server, server / "csrc_meta" / "libmhc_meta.so", package)
    assert done.returncode == 0, done.stderr
    shapes = ("bfloat16[{}, 4, 256][1024, 256, 1]", "float32[{}, 4, 1][4, 1, 1]")
    shapes += ("float32[{}, 4, 4][16, 4, 1]", "bfloat16[{}, 256][256, 1]", "float32[{}, 4][4, 1]")
    wanted = [
        " ".join(f"{shape.format(tokens)}@cpu {n}..{n}" for n, shape in enumerate(shapes, 1))
        for tokens in (1, 7)
    ]
    assert [line.strip() for line in done.stdout.splitlines()] == wanted

    without = serve(server, "-", package)
    assert without.returncode == 1
    assert "Could not find schema for mhc::post_pre_delayed" in without.stderr
