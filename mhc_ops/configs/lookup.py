"""Launch tuning: which configuration a call with T tokens of hidden size H gets.

One JSON file per architecture, named as in the file (sm_90, gfx942, ...); "default" serves the
others. A file is a list of tables, one per hidden size (null: any), and a table a list of rows in
order of max_tokens; the first row with T <= max_tokens is used, the last has null: no limit.
"""

import dataclasses
import functools
import json
import pathlib

_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Config:
    """One row. See kernels/ for what the numbers steer."""

    max_tokens: int | None
    fused: bool  # row and projection programs in one launch; these then make R' themselves.
    # Otherwise row programs first, then the projection as a matrix product, kernels/gemm.py
    row_block: int  # row: columns at a time
    row_warps: int  # row programs launched alone; fused ones have `warps`
    block_t: int  # projection: tokens a program; below 16 without tl.dot
    block_h: int  # projection: columns a step, divides H; in gemm.py of the K
    cols: int | None  # projection: columns a program, a multiple of block_h; null: all
    warps: int
    stages: int
    fence: bool  # projection: keep tl.dot's layout out of the element-wise code
    pack: bool  # split fn into three bf16 beforehand (kernels/pack.py)
    gate_t: int  # gates: tokens a program
    split_block: int  # gates: splits added a step
    gate_warps: int
    pdl: bool = False  # dependent launches, kernels/pdl.py: sm_90 and newer only
    overlap: bool = False  # nn: post_collapse beside gates may replace the fused operator
    why: str = ""

    def __post_init__(self):
        for name in ("row_block", "block_t", "block_h", "gate_t", "split_block"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.cols is not None and self.cols % self.block_h:
            raise ValueError(f"cols {self.cols} must be a multiple of block_h {self.block_h}")
        if self.block_t < 16 and (not self.fused or self.pack or self.cols not in (32, 64, 128)):
            raise ValueError(
                f"block_t {self.block_t} is below 16: needs fused, no pack, cols 32, 64 or 128"
            )


def architectures():
    """Names of the architectures with a file of their own, and "default"."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@functools.cache
def rows(architecture, hidden_size):
    """The rows for a hidden size, in order of max_tokens."""
    path = _FOLDER / f"{architecture}.json"
    if not path.exists():
        path = _FOLDER / "default.json"
    tables = {table["hidden_size"]: table["rows"] for table in json.loads(path.read_text())}
    table = tables.get(hidden_size, tables[None])
    found = tuple(Config(**row) for row in table)
    limits = [row.max_tokens for row in found]
    if limits[-1] is not None or limits[:-1] != sorted(limits[:-1]):
        raise ValueError(f"{path.name}: max_tokens must ascend and end with null, got {limits}")
    for row in found:
        if hidden_size % row.block_h:
            raise ValueError(f"{path.name}: block_h {row.block_h} does not divide H {hidden_size}")
    return found


# T whose row serves every T while batches must not matter: an unfused one, so that neither few nor
# many tokens lose more than they must.
BATCH_INVARIANT_TOKENS = 1024
_batch_invariant = False


def set_batch_invariant(on: bool = True) -> None:
    """From now on in this process, give a token the same bits on a GPU whatever T it is among.

    Otherwise T chooses tiles and splits, and sums add up in the order that these make: a gate may
    differ by 1e-6, and a layer_input by one bf16 now and then. All T then use one configuration.
    Captured graphs keep what they were captured with. On a CPU it changes nothing: there PyTorch's
    matrix product decides.
    """
    global _batch_invariant
    _batch_invariant = on


def lookup(architecture, hidden_size, tokens):
    """The configuration of a call."""
    if _batch_invariant:
        tokens = BATCH_INVARIANT_TOKENS
    for row in rows(architecture, hidden_size):
        if row.max_tokens is None or tokens <= row.max_tokens:
            return row
    raise AssertionError("the last row has no limit")
