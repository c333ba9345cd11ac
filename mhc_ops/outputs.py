"""Allocates what the operators return, for fake and real alike, so that the two cannot drift."""

import torch

from .checks import HC_MULT


def streams(residual):
    """residual_out [T, 4, H] bf16, fresh and contiguous."""
    return residual.new_empty(residual.shape)


def gates(residual):
    """post_mix [T, 4, 1], comb_mix [T, 4, 4] and next_pre_mix [T, 4], all fp32."""
    tokens = residual.shape[0]
    return (
        residual.new_empty((tokens, HC_MULT, 1), dtype=torch.float32),
        residual.new_empty((tokens, HC_MULT, HC_MULT), dtype=torch.float32),
        residual.new_empty((tokens, HC_MULT), dtype=torch.float32),
    )


def layer_input(residual):
    """layer_input [T, H] bf16."""
    tokens, _, hidden = residual.shape
    return residual.new_empty((tokens, hidden))
