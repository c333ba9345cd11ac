"""Writes operators.inc, all that the C++ knows of the operators: `python generate.py FILE`.

Schemas and tags come from schemas.txt. What is checked, and what is returned, comes from running
each operator's body in mhc_ops/ops.py once on meta tensors: C++ states neither.
"""

import json
import pathlib
import sys
import types

import torch

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "mhc_ops"
# Sizes that cannot be mistaken for one another or for a number of the contract.
T, H = 101, 32 * 1009
# As in check.cpp; other numbers stay numbers.
DIMENSIONS = {T: "T", H: "H", 4 * H: "K", H // 32: "H / 32"}


def package():
    """(checks, ops, schemas) of mhc_ops, without its __init__: that would load the library."""
    sys.modules["mhc_ops"] = bare = types.ModuleType("mhc_ops")
    bare.__path__ = [str(PACKAGE)]
    from mhc_ops import checks, ops, schemas

    return checks, ops, schemas


def probe(checks, ops, name, schema, **chosen):
    """(names of the tensors checked, names of the epsilons checked, results) of an operator.

    chosen: {argument: value} where that is not the default."""
    seen = []
    names = {a.name for a in schema.arguments}
    first = schema.arguments[0].name

    def example(argument):
        if "Tensor" not in str(argument.type):
            return argument.default_value if argument.has_default_value() else 1
        rule = checks.argument(argument.name, first)
        numbers = {dimension: size for size, dimension in DIMENSIONS.items()}
        shape = [numbers.get(dimension, dimension) for dimension in rule.shapes[0]]
        return torch.empty(shape, dtype=rule.dtypes[0], device="meta")

    def check(op, tensors, epsilons, *rest, **options):
        # In place, residual is checked a second time as a residual_out that is no argument.
        seen.extend([name for name in given if name in names] for given in (tensors, epsilons))
        checks.check(op, tensors, epsilons, *rest, **options)

    ops.check = check
    examples = {a.name: example(a) for a in schema.arguments}
    results = getattr(ops, name)(ops.fake, **{**examples, **chosen})
    tensors, epsilons = seen
    return tensors, epsilons, results if isinstance(results, tuple) else (results,)


def braces(items):
    return "{" + ", ".join(items) + "}"


def text(value):
    return json.dumps(str(value).removeprefix("torch."))


def shape(dimensions):
    return "Shape" + braces(map(text, dimensions))


def operator(checks, ops, name, schema, tags):
    parsed = torch._C.parse_schema(f"mhc::{schema}")
    tensors, epsilons, results = probe(checks, ops, name, parsed)
    quantises = any(a.name == "ue8m0" for a in parsed.arguments)
    otherwise = probe(checks, ops, name, parsed, ue8m0=False)[2] if quantises else results
    rules = {n: checks.argument(n, tensors[0]) for n in tensors}
    checked = [
        braces(
            [
                text(n),
                braces(map(shape, rule.shapes)),
                braces(map(text, rule.dtypes)),
                "true" if rule.dense else "false",
            ]
        )
        for n, rule in rules.items()
    ]
    returned = [
        braces(
            [shape(DIMENSIONS.get(size, size) for size in r.shape), text(r.dtype), text(o.dtype)]
        )
        for r, o in zip(results, otherwise, strict=True)
    ]
    known = [f"at::Tag::{tag}" for tag in tags if hasattr(torch.Tag, tag)]
    fields = [text(schema), braces(known), braces(checked)]
    fields += [braces(map(text, epsilons)), "true" if quantises else "false"]
    return braces([*fields, braces(returned)])


def main(path):
    checks, ops, schemas = package()
    lines = [
        operator(checks, ops, name, schema, tags)
        for name, (schema, tags) in schemas.read_schemas().items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("// Written by csrc_meta/generate.py.\n" + ",\n".join(lines) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
