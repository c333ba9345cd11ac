"""Loads the C++ library of schemas and Meta kernels (csrc_meta) if the package has one."""

import pathlib

import torch

REBUILD = "build it again with `MHC_BUILD_META=1 pip install --no-build-isolation .`"


def file_name(torch_version):
    """Says which torch the library was built for: loading it into another one may crash."""
    return f"libmhc_meta-torch{torch_version}.so"


def load(folder=pathlib.Path(__file__).parent):
    """Load the library in `folder`, if any; ImportError if it does not fit."""
    found = sorted(folder.glob(file_name("*")))
    path = folder / file_name(torch.__version__)
    if found and path not in found:
        raise ImportError(
            f"mhc_ops: {found[0]} was built for torch {_torch_of(found[0])}, but this is torch "
            f"{torch.__version__}: {REBUILD}, or delete it"
        )
    if found:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(f"mhc_ops: {path} does not load: {REBUILD}, or delete it") from error


def _torch_of(path):
    before, after = file_name("*").split("*")
    return path.name.removeprefix(before).removesuffix(after)


def refuse_stale(namespace, schemas):
    """ImportError unless the operators that are registered are none, or all of `schemas`.

    schemas: {operator: schema}. Returns whether they are registered.
    """
    registered = {
        name: torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}") for name in schemas
    }
    if not any(registered.values()):
        return False
    for name, found in registered.items():
        wanted = str(torch._C.parse_schema(f"{namespace}::{schemas[name]}"))
        if [str(schema) for schema in found] != [wanted]:
            raise ImportError(
                f"mhc_ops: a stale libmhc_meta is loaded, {REBUILD}. It has "
                f"{', '.join(map(str, found)) or f'no {namespace}::{name}'}, "
                f"but this version of mhc_ops has {wanted}"
            )
    return True
