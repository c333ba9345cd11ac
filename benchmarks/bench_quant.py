"""Times the seam that quantises against the seam and a separate quantiser, cold, in a CUDA graph.

    python benchmarks/bench_quant.py --hidden 5120 --out benchmarks/results/quant_h200.json

The separate one is `mhc_ops.quantise`, one launch of the same arithmetic. Nothing is timed unless
the two give the same bits.
"""

import argparse

import torch
from bench_seam import TOKENS
from harness import RESULTS, copy_bandwidth, environment, graph_time, rotating_inputs, save

import mhc_ops
from mhc_ops.testing import seam_bytes


def seam(given):
    return mhc_ops.post_pre_delayed(*given)


def fused(given, ue8m0=True):
    streams, post_mix, comb_mix, q, scale, pre_mix = mhc_ops.post_pre_delayed_quant(*given, ue8m0)
    return streams, post_mix, comb_mix, (q, scale), pre_mix


def separate(given, ue8m0=True):
    streams, post_mix, comb_mix, layer_input, pre_mix = seam(given)
    return streams, post_mix, comb_mix, mhc_ops.quantise(layer_input, ue8m0), pre_mix


def packed(given):
    """What a GEMM that reads packed scales adds to `fused`."""
    *_, (q, scale), _ = fused(given)
    return q, mhc_ops.pack_scale(scale)


COLUMNS = {
    "seam": seam,
    "seam, quantise": separate,
    "fused": fused,
    "fused, pack": packed,
    "fp32: separate": lambda given: separate(given, ue8m0=False),
    "fp32: fused": lambda given: fused(given, ue8m0=False),
}


def floor_bytes(tokens, hidden_size):
    """layer_input goes out in one byte an element and one a group, instead of two an element."""
    return seam_bytes(tokens, hidden_size) - tokens * hidden_size + tokens * hidden_size // 32


def check(given):
    for ue8m0 in (True, False):
        pairs = zip(fused(given, ue8m0)[3], separate(given, ue8m0)[3], strict=True)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            raise SystemExit(f"fused and separate differ, ue8m0 = {ue8m0}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", default=RESULTS / "quant.json")
    args = parser.parse_args()

    bandwidth = copy_bandwidth()
    report = {"environment": environment(), "copy_gb_s": bandwidth, "rows": []}
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.0f} GB/s, us per seam\n")
    for hidden in args.hidden:
        print(f"H = {hidden}\n{'T':>7}" + "".join(f"{c:>16}" for c in (*COLUMNS, "floor")))
        for tokens in args.tokens:
            inputs = rotating_inputs(tokens, hidden)
            with torch.no_grad():
                check(inputs[0])
            row = {"hidden": hidden, "tokens": tokens}
            row |= {name: graph_time(call, inputs) for name, call in COLUMNS.items()}
            row["floor"] = floor_bytes(tokens, hidden) / bandwidth / 1e3
            report["rows"].append(row)
            print(
                f"{tokens:7}" + "".join(f"{row[c]:16.2f}" for c in (*COLUMNS, "floor")), flush=True
            )
            save(args.out, report)
            del inputs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
