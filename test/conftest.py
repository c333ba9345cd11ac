"""Which tests run where, and what every test gets: a device and a seed of its own."""

import os
import zlib

import pytest
import torch

# Triton 3.9 warns until one is chosen. Set before anything imports triton.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        reason = _why_not(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(item):
    if item.get_closest_marker("interpreter"):
        return None if INTERPRETED else "needs TRITON_INTERPRET=1 set before triton is imported"
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            return "needs a GPU"
        return "the interpreter replaces the GPU's kernels" if INTERPRETED else None
    if item.get_closest_marker("aot") and INTERPRETED:
        return "the interpreter replaces the compiler"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every device that the operators have a backend for."""
    return request.param


@pytest.fixture(autouse=True)
def seed(request):
    """The same for a test in every run, another for every test."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def fresh_compiler():
    """Nothing compiled before, so that graphs and recompilations can be counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
