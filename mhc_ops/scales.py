"""FP8 activations beside the seam: quantising alone, and scales as GEMMs read them."""

import torch
from torch import Tensor


def quantise(x: Tensor, ue8m0: bool = True) -> tuple[Tensor, Tensor]:
    """What `post_pre_delayed_quant` does to its layer_input, for other tensors.

        a = max( max|x|, 1e-4 ) over 32 columns
        s = a / 448; with ue8m0 the next power of two at or above it
        q = e4m3( clamp( x / s, -448, 448 ) )

    A group with NaN or Inf has the scale NaN (Inf, if that is what it has and not ue8m0), which
    makes all its columns NaN or 0 * Inf; other groups do not notice. Zeros stay zeros.

    Args:
        x: [T, H] bf16, contiguous, H a multiple of 32; on a GPU of 128, and 16-byte aligned.
        ue8m0: scales are powers of two, float8_e8m0fnu; otherwise fp32.

    Returns:
        q [T, H] float8_e4m3fn and s [T, H / 32]. x is about q * s, column by column.

    Raises:
        As `mhc_ops.functional` says; RuntimeError: the GPU has no OCP e4m3.
    """
    return torch.ops.mhc.quantise.default(x, ue8m0)


def pack_scale(scale: Tensor) -> Tensor:
    """Scales for GEMMs that fetch them by TMA: four exponents a word, column-major.

    Args:
        scale: [T, G] float8_e8m0fnu.

    Returns:
        [T, ceil(G / 4)] int32 with strides (1, T rounded up to 4), so that every column begins at
        a multiple of 16 bytes. Byte b of word w, from the lowest, is group 4 * w + b; padding is 0.

    Raises:
        ValueError: scale is not [T, G].  TypeError: scale is not float8_e8m0fnu.
    """
    _check("pack_scale", scale)
    tokens, groups = scale.shape
    words, stride = -(-groups // 4), -(-tokens // 4) * 4
    packed = scale.new_zeros((words, stride, 4), dtype=torch.uint8)
    rows = torch.nn.functional.pad(scale.view(torch.uint8), (0, 4 * words - groups))
    packed[:, :tokens] = rows.view(tokens, words, 4).transpose(0, 1)
    return packed.view(torch.int32).view(words, stride)[:, :tokens].t()


def block_scale(scale: Tensor) -> Tensor:
    """Scales for `torch._scaled_mm` with groups of 32: blocks of 128 tokens by 4 groups.

    Args:
        scale: [T, G] float8_e8m0fnu.

    Returns:
        [ceil(T / 128) * ceil(G / 4) * 512] float8_e8m0fnu: the blocks in row-major order, within
        each the scale of token t, group g at 16 * (t % 32) + 4 * (t // 32) + g; padding is 0.

    Raises:
        ValueError: scale is not [T, G].  TypeError: scale is not float8_e8m0fnu.
    """
    _check("block_scale", scale)
    tokens, groups = scale.shape
    down, across = -(-tokens // 128), -(-groups // 4)
    pad = (0, 4 * across - groups, 0, 128 * down - tokens)
    blocks = torch.nn.functional.pad(scale.view(torch.uint8), pad)
    blocks = blocks.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1).view(torch.float8_e8m0fnu)


def _check(function, scale):
    if scale.dim() != 2:
        raise ValueError(f"{function}: scale must have shape [T, G], got {list(scale.shape)}")
    if scale.dtype != torch.float8_e8m0fnu:
        got = str(scale.dtype).removeprefix("torch.")
        raise TypeError(f"{function}: scale must have dtype float8_e8m0fnu, got {got}")
