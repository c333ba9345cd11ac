"""Makes Triton's interpreter right for bf16, e4m3 and fma. Import before running a kernel in it.

The interpreter keeps bf16 as uint16. Left alone it truncates fp32 to bf16, multiplies the raw
bits in tl.dot, and adds them in arithmetic; all silently (triton 3.6.0 to 3.9.0). Of 511
values from 2^-10 to 448 it rounds 74 to another e4m3 than the nearest, and NaN to 384. The fma of
3.6.0 rounds the product.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl
_dot = InterpreterBuilder.create_dot
_binary = InterpreterBuilder.binary_op
_convert = InterpreterBuilder.create_fp_to_fp


def _to_fp32(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values):
    contiguous = np.ascontiguousarray(values)
    bits = torch.from_numpy(contiguous).to(torch.bfloat16).view(torch.int16)
    return bits.numpy().view(np.uint16).reshape(np.shape(values))


def _cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source == tl.bfloat16 and target == tl.float32:
        return TensorHandle(_to_fp32(src.data), tl.float32)
    if source == tl.float32 and target == tl.bfloat16:
        return TensorHandle(_to_bf16(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def _create_fp_to_fp(self, src, dst_type, *rounding):
    """e4m3 as GPUs have it: to the nearest even, and to 448 what is larger; NaN stays."""
    source, target = src.dtype.scalar, dst_type.scalar
    data = torch.from_numpy(np.ascontiguousarray(src.data))
    if source == tl.float32 and target == tl.float8e4nv:
        bits = data.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return TensorHandle(bits.numpy().reshape(src.data.shape), target)
    if source == tl.float8e4nv and target == tl.float32:
        values = data.view(torch.float8_e4m3fn).float()
        return TensorHandle(values.numpy().reshape(src.data.shape), target)
    return _convert(self, src, dst_type, *rounding)


def _create_dot(self, a, b, d, *rest):
    def values(handle):
        return _to_fp32(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data

    if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
        product = np.matmul(values(a), values(b), dtype=np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)
    return _dot(self, a, b, d, *rest)


def _binary_op(self, lhs, rhs, op):
    if op in (np.add, np.subtract, np.multiply, np.divide):
        for side in (lhs, rhs):
            if side.dtype.scalar == tl.bfloat16:
                raise TypeError(f"bf16 {op.__name__} in a kernel: cast to fp32 first")
    return _binary(self, lhs, rhs, op)


def _create_fma(self, x, y, z):
    """With a product that is not rounded: that of two fp32 is exact in fp64."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(total.astype(np.float32), z.dtype.scalar)


InterpreterBuilder.create_fma = _create_fma
InterpreterBuilder.cast_impl = _cast_impl
InterpreterBuilder.create_dot = _create_dot
InterpreterBuilder.binary_op = _binary_op
InterpreterBuilder.create_fp_to_fp = _create_fp_to_fp
