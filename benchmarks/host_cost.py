"""Host time of an eager call at T = 1, against the least that a Python operator can take.

    python benchmarks/host_cost.py --out benchmarks/results/host_cost_h200.json

The bare operator has the same schema and does what no operator can do without: it allocates the
same tensors and starts the same launches, kept from an earlier call. The rest is what checks, the
choice of a configuration and the plan of launches cost.
"""

import argparse
import time

import harness
import torch

from mhc_ops import configs, launch, ops, outputs, testing


def bare_operator(given):
    """The same operator without checks and choices; its outputs are never read."""
    config = configs.lookup(launch.architecture(0), given.fn.shape[1] // 4, 1)
    steps = []

    def run(given, made):
        steps.extend(launch.plan(config, launch.vendor(), given, made))

    ops.post_pre_delayed(run, *given)
    splits = next(s.constants["SPLITS"] for s in steps if "SPLITS" in s.constants)

    def operator(residual, *rest):
        streams = outputs.streams(residual)
        post_mix, comb_mix, next_pre_mix = outputs.gates(residual)
        layer_input = outputs.layer_input(residual)
        residual.new_empty((splits, len(residual), launch.PARTIALS), dtype=torch.float32)
        for step in steps:
            launch.start(step)
        return streams, post_mix, comb_mix, layer_input, next_pre_mix

    library = torch.library.Library("mhc_bare", "FRAGMENT")
    schema = str(torch.ops.mhc.post_pre_delayed.default._schema).removeprefix("mhc::")
    library.define(schema)
    library.impl("post_pre_delayed", operator, "CUDA")
    return library, torch.ops.mhc_bare.post_pre_delayed.default


def host_us(call, calls=200, rounds=25):
    """Median over rounds of the host time of a call; the queue is drained between rounds."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return sorted(times)[rounds // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--out", default=harness.RESULTS / "host_cost.json")
    args = parser.parse_args()
    given = testing.make_inputs(1, args.hidden, device="cuda")
    library, bare = bare_operator(given)
    seam = torch.ops.mhc.post_pre_delayed.default
    with torch.inference_mode():
        row = {}
        for _ in range(3):  # alternately, so that both see the same machine
            for name, operator in (("bare", bare), ("seam", seam)):
                us = host_us(lambda operator=operator: operator(*given))
                row[name] = min(us, row.get(name, us))
    row["difference"] = row["seam"] - row["bare"]
    for name, us in row.items():
        print(f"{name:12}{us:8.1f} us")
    harness.save(args.out, {"environment": harness.environment(), "us": row})
    del library


if __name__ == "__main__":
    main()
