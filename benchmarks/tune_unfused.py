"""Searches the numbers of unfused.TABLE and prints them: about a minute on a GPU.

    python benchmarks/tune_unfused.py --hidden 5120

One field of a row after the other. Timed is always the whole chain: each kernel then finds in L2
what the one before it left there, and a split that is cheap to make pays for its sum.
"""

import argparse
import concurrent.futures
import multiprocessing
import os

import harness
import torch
import unfused
from bench_seam import TOKENS
from unfused import Gates, Gemm, Tile

from mhc_ops import testing


def candidates(tokens):
    """Stages of the search, each {field of a Chain: its values}."""
    if tokens <= 256:
        # block_h, cols, warps
        gemms = ((32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8))
        gemms += ((128, 128, 8),) if tokens <= 16 else ((32, 256, 4), (64, 256, 4))
        first = {"pre_gemm_sqrsum": [Gemm(16, *gemm, 3, False) for gemm in gemms]}
        tiles = ((1, 128, 1), (1, 256, 1), (1, 512, 2), (1, 512, 4), (1, 1024, 4), (4, 256, 4))
        gates = ((1, 1, 1), (1, 8, 1), (1, 32, 1), (1, 128, 4), (4, 8, 1), (4, 32, 4))
    else:
        few, some, many = (320, 640, 1280) if tokens <= 2048 else (1280, 2560, None)
        # block_t, block_h, cols, warps, stages
        gemms = [(64, 64, cols, 4, 3) for cols in (few, some, many)]
        gemms += [(64, 64, some, 8, 3), (64, 32, some, 4, 3), (64, 32, some, 4, 4)]
        gemms += [(32, 64, some, 4, 3), (128, 32, some, 8, 3)]
        tiles = ((4, 256, 4), (4, 512, 4), (4, 512, 8), (2, 512, 4), (1, 1024, 4), (8, 256, 4))
        first = {
            "pre_gemm_sqrsum": [Gemm(*gemm, True) for gemm in gemms],
            "post": [Tile(*tile) for tile in tiles],
        }
        gates = ((4, 8, 1), (4, 32, 1), (16, 1, 1), (16, 2, 4), (16, 8, 4), (32, 4, 4))
    gates = [Gates(*gate) for gate in gates]
    return (
        {**first, "head_reduce": [Tile(*tile) for tile in tiles], "add_rmsnorm": [2, 4, 8, 16]},
        # Behind the projection, whose number of splits they are compiled for.
        {"pre_big_fuse": gates, "pre_mix": gates},
    )


def written(value):
    """A row or a part of one, as TABLE has it."""
    if not isinstance(value, tuple):
        return repr(value)
    parts = [written(part) for part in value]
    if isinstance(value, unfused.Chain):
        parts[3] = "\n          " + parts[3]
    return f"{type(value).__name__}({', '.join(parts)})".replace(" \n", "\n")


def compile_one(job):
    """In a worker: compile, run once, compare with float64. What failed, or None."""
    hidden, chain = job
    try:
        given = testing.make_inputs(33, hidden, seed=3, device="cuda", hc_scale=10)
        testing.assert_accurate(given, unfused.run(given, chain))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def search(best, stage, hidden, pool, inputs):
    """`best`, {T: Chain}, made faster; {T: us}."""
    tries = [
        (tokens, field, value)
        for tokens in best
        for field, values in candidates(tokens)[stage].items()
        for value in dict.fromkeys((getattr(best[tokens], field), *values))
    ]
    # All compile before the first is timed: the GPU must be quiet then.
    jobs = [(hidden, best[tokens]._replace(**{field: value})) for tokens, field, value in tries]
    failures = list(pool.map(compile_one, jobs))
    fastest = dict.fromkeys(best, float("inf"))
    for (tokens, field, value), failure in zip(tries, failures, strict=True):
        if failure is not None:
            print(f"dropped T = {tokens} {value}: {failure}", flush=True)
            continue
        chain = best[tokens]._replace(**{field: value})
        us = harness.graph_time(
            lambda given, chain=chain: unfused.run(given, chain),
            inputs[tokens],
            replays=5,
            least_us=200,
        )
        if us < fastest[tokens]:
            fastest[tokens], best[tokens] = us, chain
    return fastest


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()

    print(torch.cuda.get_device_name())
    inputs = {tokens: harness.rotating_inputs(tokens, args.hidden) for tokens in args.tokens}
    best = {tokens: unfused.lookup(tokens) for tokens in args.tokens}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        for stage in range(2):
            fastest = search(best, stage, args.hidden, pool, inputs)
            print("stage", stage, {tokens: round(us, 1) for tokens, us in fastest.items()})
            for chain in best.values():
                print(f"    {written(chain)},", flush=True)


if __name__ == "__main__":
    main()
