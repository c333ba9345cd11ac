"""Outputs and workspaces inside larger allocations: NaN within, a pattern around."""

import contextlib
import math
import mmap

import pytest
import torch

MARGIN = 4096  # bytes on each side; a multiple of every alignment that the kernels use
PATTERN = 0xA5
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it


def guarded(size, dtype, device, buffers):
    """A tensor of NaN (all bits set) in the middle of a buffer, which is appended to `buffers`."""
    length = math.prod(size) * dtype.itemsize
    buffer = torch.full((length + 2 * MARGIN,), PATTERN, dtype=torch.uint8, device=device)
    buffers.append(buffer)
    inside = buffer[MARGIN : MARGIN + length]
    inside.fill_(0xFF)
    return inside.view(dtype).view(size)


def copy(tensor, buffers):
    return guarded(tensor.shape, tensor.dtype, tensor.device, buffers).copy_(tensor)


def reserved(size, dtype, device="cpu"):
    """A tensor of zeros that takes memory only where it is touched. Another 2^31 elements lie
    before it, so that an offset that wraps is wrong and no crash."""
    count = math.prod(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    pages = mmap.mmap(-1, (2**31 + count) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype)[2**31 :].view(size)


def check(buffers):
    for buffer in buffers:
        assert (buffer[:MARGIN] == PATTERN).all(), "written before the beginning"
        assert (buffer[-MARGIN:] == PATTERN).all(), "written past the end"


@contextlib.contextmanager
def allocated_by(make):
    """In here Tensor.new_empty, for the outputs and workspaces of a seam, is
    make(size, dtype, device)."""
    original = torch.Tensor.new_empty

    def new_empty(self, size, *, dtype=None, **more):
        if more:  # Triton's interpreter: it only wraps a storage that exists
            return original(self, size, dtype=dtype, **more)
        return make(tuple(size), dtype or self.dtype, self.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield


@contextlib.contextmanager
def allocations(at_least):
    """Guards what is allocated through Tensor.new_empty: the outputs and workspaces of a seam.

    What is read before it was written is NaN. At the end the surroundings must be intact, and
    at least so many tensors must have been allocated: a seam that gets its memory in another
    way would not be guarded at all.
    """
    buffers = []
    with allocated_by(lambda *what: guarded(*what, buffers)):
        yield buffers
    assert len(buffers) >= at_least, "allocated past the canaries"
    check(buffers)
