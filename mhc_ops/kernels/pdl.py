"""Programmatic dependent launch: a kernel begins while the one before it ends."""

import triton
import triton.language as tl


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the kernel before, all of it, and let the next one begin.

    With PDL a kernel is launched with launch_pdl. Nothing may be read or written before this call,
    weights included: the kernel before may have made them.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch(at):
    """Bring the 128 bytes at each pointer into L2, the one thing to do while waiting: it reads
    nothing, and what the kernel before still writes there is seen."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
