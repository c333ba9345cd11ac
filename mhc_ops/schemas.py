"""Reads schemas.txt, for the registration in Python and for the generator of csrc_meta."""

import pathlib

FILE = pathlib.Path(__file__).with_name("schemas.txt")


def read_schemas():
    """{operator: (schema, tag names)} from schemas.txt, in its order."""
    found = {}
    for line in FILE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        tags, schema = line.removeprefix("[").split("] ", 1)
        found[schema.split("(", 1)[0]] = schema, [tag.strip() for tag in tags.split(",")]
    return found
