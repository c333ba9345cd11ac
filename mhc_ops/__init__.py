"""The fused mHC seam of DeepSeek-V4.1 as PyTorch operators: `torch.ops.mhc.*`, inference only."""

from . import registration  # noqa: F401  registers the operators
from .configs import set_batch_invariant
from .functional import (
    expand_pre_delayed,
    fold_fn,
    gates,
    mhc_post_pre_delayed,
    post,
    post_collapse,
    post_pre_delayed,
    post_pre_delayed_,
    post_pre_delayed_aux,
    post_pre_delayed_out,
    post_pre_delayed_quant,
    pre_delayed,
)
from .scales import block_scale, pack_scale, quantise
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "block_scale",
    "expand_pre_delayed",
    "fold_fn",
    "gates",
    "mhc_post_pre_delayed",
    "pack_scale",
    "post",
    "post_collapse",
    "post_pre_delayed",
    "post_pre_delayed_",
    "post_pre_delayed_aux",
    "post_pre_delayed_out",
    "post_pre_delayed_quant",
    "pre_delayed",
    "quantise",
    "set_batch_invariant",
    "warmup",
]
