"""Tells DTensor that tokens may be split over devices and that weights are then whole on each.

    import mhc_ops.sharding

    mhc_ops.sharding.register()

After that the operators and `mhc_ops.nn` take DTensors whose tokens (dimension 0) are sharded and
whose weights are replicated, as in sequence- and data-parallel models. A seam needs no
communication and does none. Explicit, because importing torch.distributed.tensor takes longer
than all of mhc_ops.

Not covered, because DTensor returns only the written tensor from an operator that writes one:
`post_pre_delayed_` and `post_pre_delayed_out`. They raise; call them on `to_local()`.
"""

import functools
import math

import torch

from .checks import ARGUMENTS
from .registration import NAMESPACE, read_schemas


@functools.cache
def register():
    """Register every operator but the two that write an input. Later calls do nothing."""
    from torch.distributed.tensor.experimental import register_sharding

    for name in read_schemas():
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if not overload._schema.is_mutable:
            register_sharding(overload)(functools.partial(_placements, overload._schema))


def _placements(schema, *args, **kwargs):
    """What register_sharding asks for: pairs of output and input placements that go together."""
    from torch.distributed.tensor import Replicate, Shard

    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    tensors = [name for name in given if name in ARGUMENTS and given[name] is not None]
    for name in filter(_per_token, tensors):
        _refuse_to_gather(schema.name, name, given[name])
    outputs = len(schema.returns)
    sharded = [Shard(0) if _per_token(name) else Replicate() for name in tensors]
    return [
        ([Shard(0)] * outputs, sharded),
        ([Replicate()] * outputs, [Replicate()] * len(tensors)),
    ]


def _refuse_to_gather(op, name, spec):
    """DTensor would gather a dimension that has fewer elements than shards."""
    tokens = spec.shape[0]
    shards = math.prod(
        spec.mesh.size(dim) for dim, placed in enumerate(spec.placements) if placed.is_shard(0)
    )
    if shards > 1 and tokens < shards:
        raise ValueError(
            f"{op}: {name} has T = {tokens} sharded over {shards} devices, which DTensor would "
            "gather: replicate it, or call the operator on to_local()"
        )


def _per_token(name):
    return ARGUMENTS[name].shapes[0][0] == "T"
