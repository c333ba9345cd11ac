"""Compiles launches ahead of time, for chips that are not here, and reads what came out."""

import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that one program may have, bytes.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 * 1024),
}
MATRIX_INSTRUCTION = re.compile(r"\b(wgmma\.mma|mma\.sync|tcgen05\.mma|v_mfma)")
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
}


class Compiled(NamedTuple):
    shared: int  # bytes
    registers: int
    spills: int  # bytes of local memory, or spilled registers and bytes on AMD
    assembly: str  # ptx or amdgcn
    ir: str  # Triton's own, with the layouts


def vendor(architecture):
    return "nvidia" if architecture.startswith("sm_") else "amd"


def compile_step(step, architecture):
    """Compile a `launch.Launch` whose tensors may be on the meta device."""
    target, _ = TARGETS[architecture]
    kernel = step.kernel
    unaligned = set(kernel.do_not_specialize_on_alignment or ())
    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        if position >= len(step.args):
            signature[name] = "constexpr"
            constants[(position,)] = step.constants[name]
            continue
        value = step.args[position]
        if value is None:
            signature[name] = "constexpr"
            constants[(position,)] = None
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if name not in unaligned:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=target, options=dict(step.options))
    if target.backend == "cuda":
        registers, spills = _usage(built.asm["cubin"])
        return Compiled(
            built.metadata.shared, registers, spills, built.asm["ptx"], built.asm["ttgir"]
        )
    text = built.asm["amdgcn"]
    registers = _number(text, r"\.vgpr_count:\s+(\d+)")
    spills = _number(text, r"\.vgpr_spill_count:\s+(\d+)")
    spills += _number(text, r"\.private_segment_fixed_size:\s+(\d+)")
    return Compiled(built.metadata.shared, registers, spills, text, built.asm["ttgir"])


def _number(text, pattern):
    return int(re.search(pattern, text).group(1))


def _usage(cubin):
    """(registers, bytes of local memory): of the very binary that would run."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", f.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return _number(out, r"REG:(\d+)"), _number(out, r"STACK:(\d+)") + _number(out, r"LOCAL:(\d+)")
