"""Registers the operators with PyTorch. The only file that touches torch.library."""

import functools
import importlib

import torch

from . import meta_library, ops, reference
from .schemas import read_schemas

NAMESPACE = "mhc"


def _run_on_gpu(given, made):
    # Imported at the first call on a GPU: `import mhc_ops` stays free of triton.
    _launch().run(given, made)


@functools.cache
def _launch():
    return importlib.import_module(".launch", __package__)


# ROCm builds of torch call their device "cuda" too, so this key serves both vendors.
BACKENDS = {"CPU": reference.run, "CUDA": _run_on_gpu}


def _guard(overload, written, keyset, *args, **kwargs):
    """The Autograd key: inference only, and loudly so.

    Without it an input that requires grad would silently lose its gradient.
    """
    if torch.is_grad_enabled() and any(
        isinstance(a, torch.Tensor) and a.requires_grad for a in (*args, *kwargs.values())
    ):
        raise RuntimeError(
            f"{overload.name()} is inference only and an input requires grad: "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    results = overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
    for position, name in written:
        tensor = kwargs[name] if position is None else args[position]
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return results


def _written(schema):
    """[(position, or None if keyword-only; name)] of the arguments that an operator writes."""
    return [
        (None if argument.kwarg_only else position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _register():
    # First: the library registers nothing where the operators are there already.
    meta_library.load()
    schemas = read_schemas()
    in_library = meta_library.refuse_stale(NAMESPACE, {n: s for n, (s, _) in schemas.items()})
    # Kept alive at module level: the registrations end with the Library object.
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, (schema, tag_names) in schemas.items():
        if not in_library:
            tags = [getattr(torch.Tag, tag) for tag in tag_names if hasattr(torch.Tag, tag)]
            library.define(schema, tags=tags)
        body = getattr(ops, name)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if not in_library:  # it has a guard of its own; a second kernel would warn
            guard = functools.partial(_guard, overload, _written(overload._schema))
            library.impl(name, guard, "Autograd", with_keyset=True)
        for key, run in BACKENDS.items():
            library.impl(name, functools.partial(body, run), key)
        # In place of the library's Meta kernel: tracing follows the code that also runs eagerly.
        fake = functools.partial(body, ops.fake)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library, allow_override=True)
    return library


LIBRARY = _register()
