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


def seam_candidates(tokens, hidden):
    """The first launch: (block_t, block_h, cols, warps, stages, fence, pack)."""
    if tokens <= 16:
        space = (
            (16,),
            (32, 64, 128),
            (32, 64, 128, 256),
            (1, 2, 4, 8),
            (1,),
            (True, False),
            (False,),
        )
    elif tokens <= 64:
        space = ((16, 32), (32, 64, 128), (64, 128, 256), (4, 8), (1, 3), (True,), (False,))
    elif tokens <= 256:
        cols = (256, 640, 1280)
        space = ((16, 32), (32, 64, 128), cols, (4, 8), (1, 3), (True,), (False, True))
    elif tokens <= 2048:
        cols = (640, 1280, 2560)
        space = ((32, 64), (32, 64, 128), cols, (4, 8), (2, 3), (True,), (True, False))
    else:
        cols = (2560, None)
        space = ((16, 32, 64, 128), (32, 64, 128), cols, (4, 8), (2, 3, 4), (True,), (True,))
    for block_t, block_h, cols, warps, stages, fence, pack in itertools.product(*space):
        width = cols or hidden
        tile = block_t * block_h
        if width % block_h or width > hidden or (width == block_h and stages > 1):
            continue
        if not 2 <= tile // (32 * warps) <= 32:  # elements a thread, of each stream
            continue
        # Bytes in flight: five bf16 tiles and the weights of four streams.
        if (block_t * 10 + 72 * 8) * block_h * stages > 230_000:
            continue
        yield dict(
            block_t=block_t,
            block_h=block_h,
            cols=cols,
            warps=warps,
            stages=stages,
            fence=fence,
            pack=pack,
        )


def finish_candidates(tokens, hidden, splits):
    """The second launch."""
    if tokens <= 16:
        space = itertools.product((1,), (1,), (512, 1024, 2560, None), (512, 1024), (1, 2, 4, 8))
    elif tokens <= 256:
        space = itertools.product((1, 2, 4), (1,), (1024, 2560, None), (512, 1024), (2, 4, 8))
    else:
        space = itertools.product((4, 16, 32), (1, 2, 4), (None,), (512, 1024), (2, 4, 8))
    for gate_t, norm_t, norm_cols, norm_block, warps in space:
        if (norm_cols or hidden) > hidden or norm_block > (norm_cols or hidden):
            continue
        if norm_t * norm_block // (32 * warps) > 32:
            continue
        block = 1
        while block < splits and block * gate_t * 32 < 32 * warps * 32:
            block *= 2
        yield dict(
            gate_t=gate_t,
            split_block=block,
            norm_t=norm_t,
            norm_cols=norm_cols,
            norm_block=norm_block,
            finish_warps=warps,
        )


def default_finish(tokens, splits):
    small = tokens <= 256
    block = 1
    while block < splits and block < 128:
        block *= 2
    return dict(
        gate_t=1 if small else 16,
        split_block=block if small else min(block, 4),
        norm_t=1 if small else 2,
        norm_cols=1024 if tokens <= 16 else None,
        norm_block=1024,
        finish_warps=4,
    )


def splits_of(hidden, seam):
    return -(-hidden // (seam["cols"] or hidden))


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


def time_all(jobs, pool, inputs):
    """[(us, fields)] of the jobs that compile and are right, fastest first."""
    timed = []
    for job, failure in zip(jobs, pool.map(compile_one, jobs, chunksize=2), strict=True):
        if failure is None:
            timed.append(job)
        else:
            print("  dropped", {k: job[1][k] for k in list(job[1])[:7]}, failure, flush=True)
    results = []
    for _, fields in timed:
        us = graph_time(call(Config(max_tokens=None, **fields)), inputs, replays=7, least_us=300)
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
            seams = list(seam_candidates(tokens, hidden))
            jobs = [
                (hidden, {**seam, **default_finish(tokens, splits_of(hidden, seam))})
                for seam in seams
            ]
            first = time_all(jobs, pool, inputs)
            best = {k: first[0][1][k] for k in seams[0]}
            jobs = [
                (hidden, {**best, **finish})
                for finish in finish_candidates(tokens, hidden, splits_of(hidden, best))
            ]
            second = time_all(jobs, pool, inputs)
            ranked = sorted(first + second, key=lambda pair: pair[0])
            floor = testing.seam_bytes(tokens, hidden) / bandwidth / 1e3
            print(f"H {hidden} T {tokens}: floor {floor:.1f} us, {len(ranked)} timed", flush=True)
            for us, fields in [*first[:4], *second[:4]]:
                print(f"  {us:8.2f}", *(f"{k}={v}" for k, v in fields.items()), flush=True)
            report["rows"] += [
                {"hidden": hidden, "tokens": tokens, "us": us, **fields} for us, fields in ranked
            ]
            save(args.out, report)


if __name__ == "__main__":
    main()
