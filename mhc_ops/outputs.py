"""Allocates what the operators return, for fake and real alike, so that the two cannot drift."""

import torch

from .checks import HC_MULT


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
