"""Breaks the kernels in known ways and shows that the tests notice.

    python test/mutate.py            # on the CPU, in Triton's interpreter
    python test/mutate.py --gpu      # on a GPU

A mutant is a copy of the package with a few lines replaced. A line that is no longer there ends the
script: the list below follows the kernels. A mutant that survives makes the exit status 1.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutant(NamedTuple):
    fault: str
    edits: list  # (file in mhc_ops/kernels, text, what replaces it)
    tests: str = ""  # for pytest -k, on the CPU; none: all of the kernels' tests
    gpu_only: bool = False


CONTROL = Mutant("nothing", [], "every_eps")  # without a fault the tests pass, here as elsewhere
MUTANTS = [
    Mutant(
        "comb transposed",
        [
            ("post.py", "c[0], c[4], c[8], c[12]", "c[0], c[1], c[2], c[3]"),
            ("post.py", "c[1], c[5], c[9], c[13]", "c[4], c[5], c[6], c[7]"),
            ("post.py", "c[2], c[6], c[10], c[14]", "c[8], c[9], c[10], c[11]"),
            ("post.py", "c[3], c[7], c[11], c[15]", "c[12], c[13], c[14], c[15]"),
        ],
    ),
    Mutant("mean of squares over H, not 4 H", [("gates.py", "square / K", "square / (K // 4)")]),
    Mutant("19 iterations", [("gates.py", "range(repeat - 1)", "range(repeat - 2)")]),
    Mutant(
        "softmax over the source stream",
        [
            ("gates.py", "softmax4(p00, p01, p02, p03, eps", "softmax4(p00, p10, p20, p30, eps"),
            ("gates.py", "p00, p01, p02, p03 = softmax4", "p00, p10, p20, p30 = softmax4"),
        ],
    ),
    Mutant(
        "W in bf16",
        [("project.py", "rest = w - hi.to(tl.float32)", "rest = (w - hi.to(tl.float32)) * 0")],
    ),
    Mutant(
        "W in bf16, few tokens",
        [("project.py", "+ stream * H + cols[None, :]\n    return tl.load(at, mask=(n < 24) & "
          "(cols < H)[None, :], other=0.0)", "+ stream * H + cols[None, :]\n    return tl.load(at, "
          "mask=(n < 24) & (cols < H)[None, :], other=0.0).to(tl.bfloat16).to(tl.float32)")],
        "shipped_configuration",
    ),
    Mutant(
        "W in TF32",
        [("project.py", "hi, mid, lo = split3(w, VENDOR)", "hi, mid, lo = split3((w.to(tl.int32, "
          "bitcast=True) & -8192).to(tl.float32, bitcast=True), VENDOR)")],
    ),
    Mutant(
        "R' truncated, not rounded",
        [
            ("post.py", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
            ("post.py", "    else:\n        return x.to(tl.bfloat16)", "    else:\n        return "
             "(x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)"),
        ],
    ),
    Mutant(
        "projection and collapse of R' before it is rounded",
        [("post.py", f"b{j} = rounded(fma4({c}, r0, r1, r2, r3, p[{j}] * x), VENDOR, FENCE)",
          f"b{j} = fma4({c}, r0, r1, r2, r3, p[{j}] * x)")
         for j, c in enumerate(("c[0], c[4], c[8], c[12]", "c[1], c[5], c[9], c[13]",
                                "c[2], c[6], c[10], c[14]", "c[3], c[7], c[11], c[15]"))],
        "shipped_configuration and 90-4",  # tl.dot takes no fp32 beside bf16
    ),
    Mutant(
        "norm of u before it is rounded",
        [("row.py", "u = rounded(u, VENDOR, False)", "u = u + 0.0")],
    ),
    Mutant(
        "no mask on columns",
        [("row.py", "        mask = cols < H\n", "        mask = cols < STEPS * BLOCK\n")],
    ),
    Mutant(
        "no mask on tokens",
        [("project.py", "live = first + row < T", "live = first + row < T + BLOCK_T")],
    ),
    Mutant(
        "no mask on tokens, few of them",
        [("project.py", "T - 1).to(tl.int64)", "T + BLOCK_T).to(tl.int64)")],
        "shipped_configuration",
    ),
    Mutant(
        "no mask on tokens of the gates",
        [("gates.py", "        t < T,\n        post_mix,", "        t <= T,\n        post_mix,")],
    ),
    Mutant(
        "offsets in 32 bits",
        [("row.py", "t = token.to(tl.int64)", "t = token")],
        gpu_only=True,
    ),
    Mutant(
        "squares of three streams",
        [("post.py", "tl.fma(r3, r3, tl.fma(r2, r2, tl.fma(r1, r1, total)))",
          "tl.fma(r2, r2, tl.fma(r1, r1, total))")],
    ),
    Mutant(
        "squares of u over half the columns",
        [("row.py", "u_square += u.to(tl.float32) * u.to(tl.float32)",
          "u_square += tl.where(cols % 64 < 32, u.to(tl.float32) * u.to(tl.float32), 0.0)")],
    ),
    Mutant(
        "rms_eps outside the root",
        [("gates.py", "tl.rsqrt(square / K + rms_eps)", "(tl.rsqrt(square / K) + rms_eps)")],
    ),
    Mutant(
        "norm_eps outside the root",
        [("row.py", "/ H + norm_eps)", "/ H) + norm_eps")],
    ),
    Mutant(
        "no eps in Sinkhorn's divisions",
        [("gates.py", "eps * d0)", "0.0 * d0)"), ("gates.py", "eps * e0)", "0.0 * e0)")],
    ),
    Mutant(
        "post without its multiplier",
        [("gates.py", "post * hc_post_mult_value", "post")],
    ),
    Mutant(
        "stale partial sums: a split is not written",
        [("project.py", "(split.to(tl.int64) * T + t) * 32\n    mask = live",
          "(tl.minimum(split, 1).to(tl.int64) * T + t) * 32\n    mask = live")],
    ),
    Mutant("a dropped split", [("gates.py", "(s < SPLITS)", "(s < SPLITS - 1)")]),
    Mutant(
        "a matrix product of its last columns only",
        [("gemm.py", "acc, tail = add(acc, tail, part, part_tail)", "acc, tail = part, part_tail")],
    ),
    Mutant(
        "collapse of stream 0",
        [("row.py", "            if pre_mix is not None:\n                u = tl.fma",
          "            u = b0\n            if pre_mix is None:\n                u = tl.fma")],
    ),
    Mutant(
        "norm without its weight",
        [("row.py", " * weights[step].to(tl.float32)", "")],
    ),
    Mutant("aux a sum, not a mean", [("row.py", "(r0 + r1 + r2 + r3) * 0.25", "(r0 + r1 + r2 + r3)")]),
    Mutant(
        "a scale one power of two too large",
        [("quantise.py", "((top + 0x1FFFFF) >> 23) - 8", "((top + 0x1FFFFF) >> 23) - 7")],
    ),
]  # fmt: skip


def make(mutant, folder):
    """A copy of the package in `folder`, broken."""
    shutil.copytree(
        ROOT / "mhc_ops", folder / "mhc_ops", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, old, new in mutant.edits:
        path = folder / "mhc_ops" / "kernels" / name
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{mutant.fault}: {name} no longer has {old!r}")
        path.write_text(text.replace(old, new))


def survives(mutant, gpu):
    """The last line of the tests' output if they all passed, else None."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make(mutant, folder)
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        if gpu:
            marker = "gpu"
            files = ("test_gpu", "test_identities", "test_model_ops", "test_quant")
        else:
            environment["TRITON_INTERPRET"] = "1"
            marker, files = (
                "interpreter",
                ("test_kernels", "test_model_kernels", "test_quant_kernels"),
            )
        if mutant.tests and (mutant is CONTROL or not gpu):
            command += ["-k", mutant.tests]
        command += ["-m", marker, *(str(ROOT / "test" / f"{file}.py") for file in files)]
        # The folder before anything else that has the package: also before pytest's own settings.
        command += ["-o", f"pythonpath={folder} benchmarks"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr])[-1]
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.fault}: pytest ended with {done.returncode}: {last}")
    return None if done.returncode else last


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if (args.gpu or not mutant.gpu_only) and (args.only or "") in mutant.fault
    ]
    if not survives(CONTROL, args.gpu):
        raise SystemExit("the tests fail without a fault")
    alive = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda mutant: survives(mutant, args.gpu), chosen)
        for mutant, last in zip(chosen, results, strict=True):
            print(f"{'SURVIVES' if last else 'caught':10}{mutant.fault}  {last or ''}", flush=True)
            alive += last is not None
    print(f"{len(chosen) - alive} of {len(chosen)} caught")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
