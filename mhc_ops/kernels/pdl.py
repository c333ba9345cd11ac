"""Programmatic dependent launch: a kernel's launch overlaps the end of the one before."""

import triton
import triton.language as tl


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait until the kernel before has ended and its writes are visible; let the next begin.

    The first thing in a kernel that is launched with launch_pdl. The next one waits in the same
    way for all of this one, so nothing may be read early.
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
