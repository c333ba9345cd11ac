"""The fused mHC seam of DeepSeek-V4.1 as PyTorch operators: `torch.ops.mhc.*`, inference only."""

from . import registration  # noqa: F401  registers the operators
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
    pre_delayed,
)
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "expand_pre_delayed",
    "fold_fn",
    "gates",
    "mhc_post_pre_delayed",
    "post",
    "post_collapse",
    "post_pre_delayed",
    "post_pre_delayed_",
    "post_pre_delayed_aux",
    "post_pre_delayed_out",
    "pre_delayed",
    "warmup",
]
