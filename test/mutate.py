"""Breaks the package in known ways and shows that the tests notice.

    python test/mutate.py            # on the CPU: kernels in Triton's interpreter, and the rest
    python test/mutate.py --gpu      # on a GPU: its kernels

A mutant is a copy of the package with a few lines replaced. Text that is not there exactly once
ends the script, and fails test_supply.py: the list below follows the package. A mutant that
survives, or that does not even run, makes the exit status 1.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
CPU = "not interpreter and not aot and not gpu"


class Room(NamedTuple):
    """Which tests a mutant must not get past."""

    marker: str
    files: tuple
    control: str  # for pytest -k: tests that show that without a fault they pass here


ROOMS = {
    "interpreter": Room("interpreter", ("kernels", "model_kernels", "quant_kernels"), "every_eps"),
    "cpu": Room(
        CPU, ("identities", "reference", "checks", "configs", "inference_only", "schema"), ""
    ),
    "compile": Room(CPU, ("compile",), "keep_T_symbolic"),  # slow to import
    "aot": Room("aot", ("aot",), "before_has_ended"),
    "gpu": Room(
        "gpu", ("gpu", "identities", "reference", "model_ops", "quant", "graphs"), "every_eps"
    ),
}
TIMEOUT = 900  # seconds
# A mutant must compute something wrong. These only say that it does not compute.
BROKEN = re.compile(r"\b(Compilation|Interpreter|Syntax|Indentation|Name|Attribute|Import)Error\b")


class Mutant(NamedTuple):
    fault: str
    edits: list  # (file in mhc_ops, text, what replaces it)
    tests: str = ""  # for pytest -k, in its own room; none: all of the room's
    room: str = "interpreter"  # where it is tried; a kernel's is also tried on a GPU
    portable: bool = True  # False: it only runs in its room


MUTANTS = [
    # The mixing
    Mutant(
        "comb transposed",
        [
            ("post.py", "c[0], c[4], c[8], c[12]", "c[0], c[1], c[2], c[3]"),
            ("post.py", "c[1], c[5], c[9], c[13]", "c[4], c[5], c[6], c[7]"),
            ("post.py", "c[2], c[6], c[10], c[14]", "c[8], c[9], c[10], c[11]"),
            ("post.py", "c[3], c[7], c[11], c[15]", "c[12], c[13], c[14], c[15]"),
        ],
    ),
    Mutant(
        "R' truncated, not rounded",
        [
            ("post.py", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
            ("post.py", "    else:\n        return x.to(tl.bfloat16)", "    else:\n        "
             "return (x.to(tl.int32, bitcast=True) & -65536)"
             ".to(tl.float32, bitcast=True).to(tl.bfloat16)"),
        ],
    ),
    Mutant(
        "projection and collapse of R' before it is rounded",
        [("post.py", f"b{j} = rounded(fma4({c}, r0, r1, r2, r3, p[{j}] * x), VENDOR, FENCE)",
          f"b{j} = fma4({c}, r0, r1, r2, r3, p[{j}] * x)")
         for j, c in enumerate(("c[0], c[4], c[8], c[12]", "c[1], c[5], c[9], c[13]",
                                "c[2], c[6], c[10], c[14]", "c[3], c[7], c[11], c[15]"))],
        "shipped_configuration and 90-4",
        portable=False,  # tl.dot takes no fp32 beside bf16; here few tokens go without it
    ),
    # The projection
    Mutant(
        "W in bf16",
        [("project.py", "rest = w - hi.to(tl.float32)", "rest = (w - hi.to(tl.float32)) * 0")],
    ),
    Mutant(
        "W in bf16, few tokens",
        [("project.py", "return tl.load(at, mask=(n < 24) & (cols < H)[None, :], other=0.0)",
          "return tl.load(at, mask=(n < 24) & (cols < H)[None, :], other=0.0)"
          ".to(tl.bfloat16).to(tl.float32)")],
        "shipped_configuration",
    ),
    Mutant(
        "W in TF32",
        [("project.py", "hi, mid, lo = split3(w, VENDOR)", "hi, mid, lo = split3((w.to(tl.int32, "
          "bitcast=True) & -8192).to(tl.float32, bitcast=True), VENDOR)")],
    ),
    Mutant(
        "W without its last eight bits, packed",
        [("pack.py", "(first + 2 * step) * K + cols, lo)",
          "(first + 2 * step) * K + cols, (lo.to(tl.float32) * 0.0).to(tl.bfloat16))")],
        "packing",
        portable=False,  # 2e-7 of a gate: only the test of the packed bits sees it
    ),
    Mutant(
        "stale partial sums: a split is not written",
        [("project.py", "(split.to(tl.int64) * T + t) * 32\n    mask",
          "(tl.minimum(split, 1).to(tl.int64) * T + t) * 32\n    mask")],
    ),
    Mutant("a dropped split", [("gates.py", "(s < SPLITS)", "(s < SPLITS - 1)")]),
    Mutant(
        "partial sums of the first split, every time",
        [("gates.py", "s.to(tl.int64) * T", "(s * 0).to(tl.int64) * T")],
    ),
    Mutant(
        "a matrix product of its last columns only",
        [("gemm.py", "acc, tail = add(acc, tail, part, part_tail)", "acc, tail = part, part_tail")],
        "configuration and rows",
    ),
    # The gates
    Mutant("mean of squares over H, not 4 H", [("gates.py", "square / K", "square / (K // 4)")]),
    Mutant(
        "squares of three streams",
        [("post.py", "tl.fma(r3, r3, tl.fma(r2, r2, tl.fma(r1, r1, total)))",
          "tl.fma(r2, r2, tl.fma(r1, r1, total))")],
    ),
    Mutant("19 iterations", [("gates.py", "range(repeat - 1)", "range(repeat - 2)")]),
    Mutant(
        "softmax over the source stream",
        [("gates.py", "p00, p01, p02, p03 = softmax4(p00, p01, p02, p03, eps",
          "p00, p10, p20, p30 = softmax4(p00, p10, p20, p30, eps")],
    ),
    Mutant(
        "softmax of what overflows",
        [("gates.py", "top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))", "top = a * 0.0")],
        "huge_comb_logits",
    ),
    Mutant(
        "rms_eps outside the root",
        [("gates.py", "tl.rsqrt(square / K + rms_eps)", "(tl.rsqrt(square / K) + rms_eps)")],
        "every_eps",
    ),
    Mutant(
        "no eps in Sinkhorn's divisions",
        [("gates.py", f"eps * {v}{i})", f"0.0 * {v}{i})") for v in "de" for i in range(4)],
        "every_eps",
    ),
    Mutant("post without its multiplier", [("gates.py", "post * hc_post_mult_value", "post")]),
    # The collapse
    Mutant(
        "norm of u before it is rounded",
        [("row.py", "u = rounded(u, VENDOR, False)", "u = u + 0.0")],
    ),
    Mutant(
        "squares of u over half the columns",
        [("row.py", "u_square += u.to(tl.float32) * u.to(tl.float32)",
          "u_square += tl.where(cols % 64 < 32, u.to(tl.float32) * u.to(tl.float32), 0.0)")],
    ),
    Mutant(
        "norm_eps outside the root",
        [("row.py", "/ H + norm_eps)", "/ H) + norm_eps")],
        "every_eps",
    ),
    Mutant(
        "collapse of stream 0",
        [("row.py", "            if pre_mix is not None:\n                u = tl.fma",
          "            u = b0\n            if pre_mix is None:\n                u = tl.fma")],
    ),
    Mutant("norm without its weight", [("row.py", " * weights[step].to(tl.float32)", "")]),
    Mutant(
        "aux a sum, not a mean",
        [("row.py", "(r0 + r1 + r2 + r3) * 0.25", "(r0 + r1 + r2 + r3)")],
        "model_kernels",
    ),
    Mutant(
        "a scale one power of two too large",
        [("quantise.py", "((top + 0x1FFFFF) >> 23) - 8", "((top + 0x1FFFFF) >> 23) - 7")],
        "quant_kernels",
    ),
    # Where it is read and written
    Mutant(
        "no mask on columns",
        [("row.py", "        mask = cols < H\n", "        mask = cols < STEPS * BLOCK\n")],
        "configuration and rows",
    ),
    Mutant(
        "no mask on tokens",
        [("project.py", "live = first + row < T", "live = first + row < T + BLOCK_T")],
    ),
    Mutant(
        "no mask on tokens, product",
        [("gemm.py", "live = first + row < T", "live = first + row < T + BLOCK_T")],
        "configuration and rows",
    ),
    Mutant(
        "no mask on tokens, few of them",
        [("project.py", "T - 1).to(tl.int64)\n        tl.store",
          "T + BLOCK_T).to(tl.int64)\n        tl.store")],
        "shipped_configuration",
    ),
    Mutant(
        "no mask on tokens of the gates",
        [("gates.py", "        t < T,\n        post_mix,", "        t <= T,\n        post_mix,")],
    ),
    Mutant(
        "offsets in 32 bits, rows",
        [("row.py", "t = token.to(tl.int64)", "t = token")],
        "past_32",
    ),
    Mutant(
        "offsets in 32 bits, projection",
        [("project.py", "first = tile.to(tl.int64) * BLOCK_T", "first = tile * BLOCK_T")],
        "past_32",
    ),
    Mutant(
        "offsets in 32 bits, few tokens",
        [("project.py", "T - 1).to(tl.int64)\n        b0, b1", "T - 1)\n        b0, b1")],
        "past_32",
        portable=False,  # on a GPU it takes more tokens than it has memory for
    ),
    Mutant(
        "offsets in 32 bits, product",
        [("gemm.py", "(tl.program_id(0) // SPLITS).to(tl.int64)", "(tl.program_id(0) // SPLITS)")],
        "past_32",
    ),
    Mutant(
        "offsets in 32 bits, gates",
        [("gates.py", "    row = t.to(tl.int64)\n", "    row = t\n")],
        "past_32",
        portable=False,
    ),
    Mutant(
        "a launch without tokens",
        [("launch.py", "if tokens == 0:\n        return", "if tokens == 0:\n        pass")],
        "no_tokens_launch",
    ),
    Mutant(
        "a dependent launch that does not wait",
        [("pdl.py", "griddepcontrol.wait; ", "")],
        "before_has_ended",
        "aot",
    ),
    # What only a GPU shows
    Mutant(
        "kernels that were compiled for other arguments",
        [("launch.py", "given.norm_weight is not None and given.norm_weight.dtype,", "0,")],
        "optional_inputs",
        "gpu",
    ),
    Mutant(
        "a warm-up without the most tokens",
        [("warmup.py", "rows.index(first_unlimited) + 1", "rows.index(first_unlimited)")],
        "nothing_compiles",
        "gpu",
    ),
    # The CPU's backend, which the others are compared with
    Mutant(
        "CPU: comb transposed",
        [("reference.py", "comb_res_mix[:, i, :, None]", "comb_res_mix[:, :, i, None]")],
        room="cpu",
    ),
    Mutant(
        "CPU: projection and collapse of R' before it is rounded",
        [("reference.py", "return mixed.bfloat16()", "return mixed")],
        room="cpu",
    ),
    Mutant(
        "CPU: W in bf16",
        [("reference.py", "fn.double().t()", "fn.bfloat16().double().t()")],
        room="cpu",
    ),
    Mutant(
        "CPU: mean of squares over H, not 4 H",
        [("reference.py", "torch.rsqrt(flat", "torch.rsqrt(4 * flat")],
        room="cpu",
    ),
    Mutant(
        "CPU: 19 iterations",
        [("reference.py", "range(repeat - 1)", "range(repeat - 2)")],
        room="cpu",
    ),
    Mutant(
        "CPU: rms_eps outside the root",
        [("reference.py", "keepdim=True) + rms_eps)", "keepdim=True)) + rms_eps")],
        room="cpu",
    ),
    Mutant(
        "CPU: collapse with the gate of this seam",
        [("reference.py", "else given.pre_mix[rows]", "else made.next_pre_mix[rows]")],
        room="cpu",
    ),
    Mutant(
        "CPU: norm of u before it is rounded",
        [("reference.py", "return u.bfloat16()", "return u")],
        room="cpu",
    ),
    # Around the kernels
    Mutant(
        "an H that no kernel is for",
        [("checks.py", "hidden % 128 != 0", "hidden % 64 != 0")],
        "hidden_size",
        "cpu",
    ),
    Mutant(
        "an output that is an input",
        [("ops.py", '_check("post_pre_delayed", run, given)\n    return _fill(run, given, '
          "outputs.streams(given.residual))", '_check("post_pre_delayed", run, given)\n    '
          "return _fill(run, given, given.residual)")],
        "outputs_are_fresh",
        "cpu",
    ),
    Mutant(
        "a gradient that is lost",
        [("registration.py", "if torch.is_grad_enabled() and any(", "if False and any(")],
        "inference_only",
        "cpu",
    ),
    Mutant(
        "a schema that drifted",
        [("schemas.txt", "quantise(Tensor x, bool ue8m0=True)",
          "quantise(Tensor x, bool ue8m0=False)")],
        "schema",
        "cpu",
    ),
    Mutant(
        "a T that tracing takes for a number",
        [("outputs.py", "tokens = source.shape[0]\n    return (",
          "tokens = int(source.shape[0])\n    return (")],
        "keep_T_symbolic",
        "compile",
    ),
    Mutant(
        "another chip's settings",
        [("lookup.py", '_FOLDER / "default.json"', '_FOLDER / "sm_100.json"')],
        "configs",
        "cpu",
    ),
    Mutant(
        "the settings of more tokens at a row's edge",
        [("lookup.py", "tokens <= row.max_tokens", "tokens < row.max_tokens")],
        "configs",
        "cpu",
    ),
]  # fmt: skip


def broken(mutant, package):
    """{path: its text, broken} of the package's files that a mutant changes."""
    texts = {}
    for name, old, new in mutant.edits:
        (path,) = package.rglob(name)
        text = texts.get(path) or path.read_text()
        if text.count(old) != 1:
            raise SystemExit(
                f"{mutant.fault}: {name} has {old!r} {text.count(old)} times, not once"
            )
        texts[path] = text.replace(old, new)
    return texts


def run(mutant, room):
    """(whether the tests failed as they should, why) of a mutant."""
    marker, files, _ = ROOMS[room]
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder) / "mhc_ops"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "mhc_ops", package, ignore=ignored)
        for path, text in broken(mutant, package).items():
            path.write_text(text)
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{folder}/cache",
            "TRITON_INTERPRET": str(int(room == "interpreter")),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "500",  # of the summary that is read below
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            marker,
        ]
        if mutant.tests and mutant.room == room:
            command += ["-k", mutant.tests]
        command += [str(ROOT / "test" / f"test_{file}.py") for file in files]
        # The folder before anything else that has the package: also before pytest's own settings.
        command += ["-o", f"pythonpath={folder} benchmarks"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return False, f"has not ended after {TIMEOUT} s"
    if done.returncode < 0:
        return True, f"crashes with signal {-done.returncode}"
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    if done.returncode == 1 and failed:
        why = re.sub(r"^\S*/", "", failed[0])[:200]
        return (False, f"does not run: {why}") if BROKEN.search(why) else (True, why)
    if done.returncode == 0:
        return False, lines[-1]
    raise SystemExit(f"{mutant.fault}: pytest ended with {done.returncode}: {lines[-1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    for mutant in MUTANTS:
        broken(mutant, ROOT / "mhc_ops")
    if args.gpu:
        tried = [m for m in MUTANTS if m.room == "gpu" or (m.room == "interpreter" and m.portable)]
    else:
        tried = [m for m in MUTANTS if m.room != "gpu"]
    tried = [m for m in tried if args.only in m.fault]
    rooms = ["gpu" if args.gpu else m.room for m in tried]
    for room in dict.fromkeys(rooms):
        noticed, why = run(Mutant("nothing", [], ROOMS[room].control, room), room)
        if noticed or "passed" not in why:
            raise SystemExit(f"the tests fail without a fault: {why}")
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for mutant, (noticed, why) in zip(tried, pool.map(run, tried, rooms), strict=True):
            print(f"{'caught' if noticed else 'SURVIVES':10}{mutant.fault}: {why}", flush=True)
            caught += noticed
    print(f"{caught} of {len(tried)} caught")
    sys.exit(caught < len(tried))


if __name__ == "__main__":
    main()
