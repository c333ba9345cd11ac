"""Times the fused seam against eager PyTorch and torch.compile, with the memory floor beside it.

    python benchmarks/bench_seam.py --hidden 5120 --out benchmarks/results/seam_h200.json

Correctness first: nothing is timed whose outputs are out of tolerance.
"""

import argparse
import functools

import torch
from harness import (
    RESULTS,
    copy_bandwidth,
    environment,
    graph_time,
    rotating_inputs,
    save,
)

import mhc_ops
from mhc_ops import reference, testing

TOKENS = (1, 8, 64, 192, 768, 4096, 16316)


def eager(given):
    """The seam as PyTorch model code writes it, on whole tensors."""
    streams = reference.post(
        given.residual, given.sublayer_out, given.post_layer_mix, given.comb_res_mix
    )
    post_mix, comb_mix, next_pre_mix = reference.gates(streams, *given.gate)
    collapsed = reference.collapse(streams, given.pre_mix)
    layer_input = reference.norm(collapsed, given.norm_weight, given.norm_eps)
    return streams, post_mix, comb_mix, layer_input, next_pre_mix


def fused(given):
    return mhc_ops.post_pre_delayed(*given)


def variants():
    """{column: function of a Given}. Fresh ones per T, so that torch.compile specialises."""
    return {
        "eager": eager,
        "torch.compile": torch.compile(functools.partial(eager), dynamic=False),
        "fused": fused,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", nargs="+", help="columns to time; all if not given")
    parser.add_argument("--out", default=RESULTS / "seam.json")
    args = parser.parse_args()

    bandwidth = copy_bandwidth()
    report = {"environment": environment(), "copy_gb_s": bandwidth, "rows": []}
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.0f} GB/s, us per seam\n")
    for hidden in args.hidden:
        columns = [c for c in variants() if args.only is None or c in args.only]
        print(
            f"H = {hidden}\n{'T':>7}" + "".join(f"{c:>15}" for c in (*columns, "floor", "of copy"))
        )
        for tokens in args.tokens:
            inputs = rotating_inputs(tokens, hidden)
            with torch.no_grad():
                testing.assert_accurate(inputs[0], fused(inputs[0]))
            floor = testing.seam_bytes(tokens, hidden) / bandwidth / 1e3
            row = {"hidden": hidden, "tokens": tokens, "floor": floor}
            for name in columns:
                torch._dynamo.reset()
                row[name] = graph_time(variants()[name], inputs)
            report["rows"].append(row)
            cells = "".join(f"{row[c]:15.2f}" for c in (*columns, "floor"))
            print(f"{tokens:7}{cells}{floor / row['fused']:15.0%}", flush=True)
            save(args.out, report)
            del inputs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
