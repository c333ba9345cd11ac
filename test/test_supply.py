"""The package runs no code but its own and writes no files; what CI installs is pinned."""

import ast
import pathlib
import re

import mutate
import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted((ROOT / "mhc_ops").rglob("*.py"))
# Runs or unpickles what it is given, starts programs, opens connections, or writes.
CALLS = {"eval", "exec", "compile", "__import__", "open", "input", "breakpoint"}
METHODS = {"write_text", "write_bytes", "mkdir", "unlink", "rmtree", "system", "popen"}
METHODS |= {"open", "touch", "rename", "tofile", "copyfile", "copytree"}
IMPORTS = {"pickle", "marshal", "shelve", "subprocess", "socket", "urllib", "requests", "tempfile"}


def what(tree):
    """Names of what a module does that it must not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name.split(".")[0] for alias in node.names} & IMPORTS
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from {node.module.split(".")[0]} & IMPORTS
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield from {function.id} & CALLS
            elif isinstance(function, ast.Attribute):
                yield from {function.attr} & METHODS
                if ast.unparse(function) in ("torch.load", "torch.save"):
                    yield ast.unparse(function)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules(path):
    assert not list(what(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "import pickle",
        "from subprocess import run",
        "torch.load(f)",
        "p.write_text(s)",
    ],
)
def test_that_would_be_seen(text):
    assert list(what(ast.parse(text)))


def test_what_is_installed_is_pinned():
    makefile = (ROOT / "Makefile").read_text()
    tools = re.search(r"^TEST_TOOLS := (.*?)(?<!\\)$", makefile, re.MULTILINE | re.DOTALL)[1]
    tools = tools.replace("\\\n", " ").split()
    unpinned = [tool for tool in tools if not re.search(r"==|<\d", tool)]
    assert not unpinned
    for line in re.findall(
        r"^(?:TORCH|TRITON|LINT_TOOLS|TRITON_OLDEST)\s*[:?]?= (.*)$", makefile, re.M
    ):
        assert re.search(r"\d+\.\d+\.\d+$", line)


@pytest.mark.parametrize("mutant", mutate.MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutants_follow_the_package(mutant):
    """`make mutants` takes minutes; that a changed line took a mutant away is seen here."""
    assert mutate.broken(mutant, ROOT / "mhc_ops")
