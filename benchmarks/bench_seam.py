"""Times the seam against the chain of kernels that engines run, eager PyTorch and torch.compile.

    python benchmarks/bench_seam.py --hidden 5120 --out benchmarks/results/seam.json
    python benchmarks/bench_seam.py --plot benchmarks/results/seam.json      # without a GPU

Columns (--only names some): eager; torch.compile; unfused, see unfused.py; portable, the operator
without dependent launches, as it runs everywhere; best, the operator as it is. Correctness first:
nothing is timed whose outputs are out of tolerance.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib

import harness
import report
import torch
import unfused

import mhc_ops
from mhc_ops import configs, launch, ops, reference, testing
from mhc_ops.kernels.seam import seam_kernel

TOKENS = (1, 8, 64, 192, 768, 4096, 16316)
PER_KERNEL = (192, 16316)  # T for which every kernel is also timed alone


def eager(given):
    """The seam as PyTorch model code writes it, on whole tensors."""
    streams = reference.post(
        given.residual, given.sublayer_out, given.post_layer_mix, given.comb_res_mix
    )
    post_mix, comb_mix, next_pre_mix = reference.gates(streams, *given.gate)
    collapsed = reference.collapse(streams, given.pre_mix)
    layer_input = reference.norm(collapsed, given.norm_weight, given.norm_eps)
    return streams, post_mix, comb_mix, layer_input, next_pre_mix


def portable_config(given):
    """The operator's configuration without what only some NVIDIA chips can do."""
    return dataclasses.replace(best_config(given), pdl=False)


def best_config(given):
    tokens, _, hidden = given.residual.shape
    return configs.lookup(launch.architecture(given.residual.device.index), hidden, tokens)


def portable(given):
    def run(given, made):
        launch.run_with(portable_config(given), launch.vendor(), given, made)

    return ops.post_pre_delayed(run, *given)


def best(given):
    return mhc_ops.post_pre_delayed(*given)


def best_plan(given, made):
    """(name, launch.Launch) of what `best` runs."""
    for step in launch.plan(best_config(given), launch.vendor(), given, made):
        yield name_of(step), step


def name_of(step):
    if step.kernel is not seam_kernel:
        return step.kernel.__name__.removesuffix("_kernel")
    args = dict(zip(step.kernel.arg_names, step.args, strict=False))  # without constexprs
    programs = {"rows": args["residual_out"], "projection": args["weight"], "pack": args["packed"]}
    return " and ".join(name for name, wanted in programs.items() if wanted is not None)


def unfused_plan(given, made):
    return unfused.plan(unfused.lookup(given.residual.shape[0]), launch.vendor(), given, made)


def alone(plan, given):
    """[[name, us]] of the launches of a plan for post_pre_delayed, each replayed on its own."""
    steps = []

    def run(given, made):
        for name, step in plan(given, made):
            launch.start(step)  # so that the next one's inputs are real
            steps.append((name, step))

    ops.post_pre_delayed(run, *given)
    torch.cuda.synchronize()
    return [
        [name, harness.graph_time(launch.start, harness.rotating_launches(step))]
        for name, step in steps
    ]


def variants():
    """{column: function of a Given}. Fresh ones per T, so that torch.compile specialises."""
    return {
        "eager": eager,
        "torch.compile": torch.compile(functools.partial(eager), dynamic=False),
        "unfused": unfused.run,
        "portable": portable,
        "best": best,
    }


def check(given, columns):
    """Those that are meant to hold the operator's numbers."""
    for column in ("unfused", "portable", "best"):
        if column in columns:
            with torch.no_grad():
                testing.assert_accurate(given, variants()[column](given))


def measure(tokens, hidden, bandwidth, columns, per_kernel):
    """(row, entry of per_kernel or None), see report.py."""
    inputs = harness.rotating_inputs(tokens, hidden)
    check(inputs[0], columns)
    floor = testing.seam_bytes(tokens, hidden) / bandwidth / 1e3
    row = {"hidden": hidden, "tokens": tokens, "floor": floor}
    for name in columns:
        torch._dynamo.reset()
        row[name] = harness.graph_time(variants()[name], inputs)
    if not per_kernel:
        return row, None
    kernels = {"hidden": hidden, "tokens": tokens}
    for name, plan in (("unfused", unfused_plan), ("best", best_plan)):
        kernels[name] = alone(plan, inputs[0])
        kernels[f"{name} together"] = row[name]
    return row, kernels


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", nargs="+", choices=report.COLUMNS, default=report.COLUMNS)
    parser.add_argument("--out", type=pathlib.Path, default=harness.RESULTS / "seam.json")
    parser.add_argument("--plot", type=pathlib.Path, help="show saved results, measure nothing")
    args = parser.parse_args()
    if args.plot:
        show(json.loads(args.plot.read_text()), args.plot)
        return

    bandwidth = harness.copy_bandwidth()
    results = {
        "environment": harness.environment(),
        "copy_gb_s": bandwidth,
        "rows": [],
        "per_kernel": [],
    }
    for hidden, tokens in itertools.product(args.hidden, args.tokens):
        per_kernel = tokens in PER_KERNEL and {"unfused", "best"} <= set(args.only)
        row, kernels = measure(tokens, hidden, bandwidth, args.only, per_kernel)
        results["rows"].append(row)
        if kernels:
            results["per_kernel"].append(kernels)
        harness.save(args.out, results)
        print(*(f"{k} {v:.5g}" for k, v in row.items()), flush=True)
        torch.cuda.empty_cache()
    show(results, args.out)


def show(results, path):
    """Tables to the terminal, the plot beside the file of results."""
    print(f"\n{report.tables(results)}\n")
    report.plot(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
