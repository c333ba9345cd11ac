"""Times launch configurations and prints the fastest for each T; the configs come from here.

    python benchmarks/tune.py --hidden 5120 --tokens 1 64 192 --out tune.json

Compiles every candidate in parallel processes first (Triton's disk cache carries them over),
drops those that fail to compile or miss float64, then times the others on one quiet GPU.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os

import torch
from harness import copy_bandwidth, environment, graph_time, rotating_inputs, save

from mhc_ops import launch, ops, testing
from mhc_ops.configs import Config


def candidates(tokens, hidden):
    """Stages of the search, each a list of changes to the best so far."""
    few = itertools.product((1, 2, 4), (64, 128), (4, 8)) if tokens <= 16 else ()
    tiles = [
        dict(block_t=t, block_h=32, cols=cols, warps=warps, stages=1, fence=False)
        for t, cols, warps in few
        if t <= tokens
    ]
    if 8 <= tokens <= 512:
        space = ((16, 32), (16, 64), (32, 32), (32, 64)), (64, 128, 256), (4, 8), (1, 2, 3)
        tiles += [
            dict(block_t=t, block_h=h, cols=cols, warps=warps, stages=stages, fence=True)
            for (t, h), cols, warps, stages in itertools.product(*space)
            if (stages == 1 or cols > h) and t * h >= 128 * warps
        ]
    for tile in tiles:
        tile.update(fused=True, pack=False)
    if tokens >= 192:
        space = ((64, 64), (64, 128), (128, 64), (128, 128)), (320, 640, 1280, 2560, None), (4, 8)
        tiles += [
            dict(
                block_t=t, block_h=h, cols=cols, warps=warps, stages=stages, fence=False,
                fused=False, pack=True,
            )
            for (t, h), cols, warps, stages in itertools.product(*space, (3, 4))
            if (cols or hidden) % h == 0
            and (t + 80) * h * 2 * stages <= 230_000
            and 8 <= tokens * hidden // (t * (cols or hidden)) <= 1024  # programs
        ]  # fmt: skip
    yield tiles
    yield [
        {"row_block": block, "row_warps": warps}
        for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8, 16))
        if (4 <= block // (32 * warps) <= 64) and not (tokens <= 192 and warps != 4)
    ]
    yield [
        dict(gate_t=t, split_block=block, gate_warps=warps, pdl=pdl)
        for t, block, warps, pdl in itertools.product(
            (1, 4, 16), (1, 8, 32, 128), (1, 4), (False, True)
        )
        if t * block <= 128
        and not (tokens <= 16 and t > 1)
        and not (tokens > 2048 and t == 1)
        and not (tokens > 384 and pdl)
    ]


def beginning(tokens):
    """Where the search begins."""
    small = tokens <= 192
    return dict(
        fused=small, row_block=2048, row_warps=4, block_t=16 if small else 64, block_h=64,
        cols=64 if small else 640, warps=4, stages=1 if small else 3, fence=small, pack=not small,
        gate_t=1 if small else 4, split_block=8, gate_warps=1, pdl=tokens <= 32,
    )  # fmt: skip


def call(config):
    def run(given, made):
        launch.run_with(config, launch.vendor(), given, made)

    return lambda given: ops.post_pre_delayed(run, *given)


def compile_one(job):
    """In a worker: compile, run once, compare with float64. None if it failed."""
    hidden, fields = job
    try:
        for scale in (1, 30):
            given = testing.make_inputs(33, hidden, seed=3, device="cuda", hc_scale=scale)
            outputs = call(Config(max_tokens=None, **fields))(given)
            testing.assert_accurate(given, outputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def time_all(hidden, every, pool, inputs):
    """[(us, fields)] of those that compile and are right, fastest first."""
    # All of them before the first is timed: the GPU must be quiet then.
    failures = list(pool.map(compile_one, [(hidden, fields) for fields in every]))
    results = []
    for fields, failure in zip(every, failures, strict=True):
        if failure is not None:
            print("  dropped", *fields.values(), failure, flush=True)
            continue
        us = graph_time(call(Config(max_tokens=None, **fields)), inputs, replays=5, least_us=200)
        results.append((us, fields))
    return sorted(results, key=lambda pair: pair[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[5120])
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()

    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.0f} GB/s")
    report = {"environment": environment(), "copy_gb_s": bandwidth, "rows": []}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        for hidden, tokens in itertools.product(args.hidden, args.tokens):
            inputs = rotating_inputs(tokens, hidden)
            ranked = [(float("inf"), beginning(tokens))]
            for changes in candidates(tokens, hidden):
                every = [{**ranked[0][1], **change} for change in changes]
                found = time_all(hidden, every, pool, inputs)
                for us, fields in found[:4]:
                    print(f"  {us:8.2f}", *(f"{k}={v}" for k, v in fields.items()), flush=True)
                ranked = sorted(ranked + found, key=lambda pair: pair[0])
            floor = testing.seam_bytes(tokens, hidden) / bandwidth / 1e3
            print(f"H {hidden} T {tokens}: floor {floor:.1f} us, {len(ranked)} timed", flush=True)
            report["rows"] += [
                {"hidden": hidden, "tokens": tokens, "us": us, **fields}
                for us, fields in ranked[:-1]
            ]
            save(args.out, report)


if __name__ == "__main__":
    main()
