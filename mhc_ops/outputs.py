"""Allocates what the operators return, for fake and real alike, so that the two cannot drift."""

import torch

from .checks import GROUP, HC_MULT


def streams(source):
    """residual_out [T, 4, H] bf16, fresh and contiguous. `source` has T first and H last."""
    return source.new_empty((source.shape[0], HC_MULT, source.shape[-1]))


def gates(source):
    """post_mix [T, 4, 1], comb_mix [T, 4, 4] and next_pre_mix [T, 4], all fp32."""
    tokens = source.shape[0]
    return (
        source.new_empty((tokens, HC_MULT, 1), dtype=torch.float32),
        source.new_empty((tokens, HC_MULT, HC_MULT), dtype=torch.float32),
        source.new_empty((tokens, HC_MULT), dtype=torch.float32),
    )


def layer_input(source):
    """layer_input [T, H] bf16. aux is the same."""
    return source.new_empty((source.shape[0], source.shape[-1]))


def quantised(source, ue8m0):
    """layer_input_q [T, H] float8_e4m3fn and its scale [T, H / 32]: float8_e8m0fnu or fp32."""
    tokens, hidden = source.shape[0], source.shape[-1]
    return (
        source.new_empty((tokens, hidden), dtype=torch.float8_e4m3fn),
        source.new_empty(
            (tokens, hidden // GROUP), dtype=torch.float8_e8m0fnu if ue8m0 else torch.float32
        ),
    )
