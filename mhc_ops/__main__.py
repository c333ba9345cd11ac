"""The demo: finds out what is here, checks the fused seam on it, and times it.

Runs DeepSeek-V4.1-Flash shapes (H = 5120). Exits with 1 if anything is off, and says what.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import time

import torch

import mhc_ops
from mhc_ops import testing

HIDDEN_SIZE = 5120
TOKENS = {"cpu": (1, 64, 192), "cuda": (1, 64, 192, 4096)}


def main():
    parser = argparse.ArgumentParser(prog="python -m mhc_ops", description=__doc__)
    parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"mhc_ops {mhc_ops.__version__}: the fused mHC seam, H = {HIDDEN_SIZE}\n")
    describe(device)
    with torch.inference_mode():
        problems = run(device)
    print()
    for problem in problems:
        print(f"WRONG: {problem}")
    if not problems:
        print("All as it should be.")
    return 1 if problems else 0


def describe(device):
    """Print what was found and, on a GPU, compile the kernels."""
    try:
        import triton
    except ImportError:
        triton = None
    line("torch", torch.__version__)
    line("triton", triton.__version__ if triton else "not installed")
    if device == "cpu":
        line("device", f"{platform.machine()} CPU, {torch.get_num_threads()} threads")
        line("backend", "PyTorch on CPU")
        return
    from mhc_ops import configs, launch

    index = torch.cuda.current_device()
    name = torch.cuda.get_device_name(index)
    architecture = launch.architecture(index)
    file = architecture if architecture in configs.architectures() else "default"
    line("device", f"{name}, {architecture}")
    line("backend", f"Triton kernels on {name}, configs/{file}.json")
    begin = time.perf_counter()
    ready = mhc_ops.warmup(HIDDEN_SIZE, max(TOKENS["cuda"]), operators=["post_pre_delayed"])
    line("warm-up", f"{ready} kernel variants in {time.perf_counter() - begin:.1f} s")


def run(device):
    """Check and time every token count; return what is wrong."""
    backend = "inductor" if device == "cuda" or has_cxx_compiler() else "aot_eager"
    if backend != "inductor":
        line("compile", "no C++ compiler found: torch.compile runs with backend='aot_eager'")
    compiled_seam = torch.compile(mhc_ops.post_pre_delayed, fullgraph=True, backend=backend)
    bandwidth = copy_bandwidth(device)
    columns = TOKENS[device]
    problems, errors, same, times = [], {}, {}, {}
    for tokens in columns:
        given = testing.make_inputs(tokens, HIDDEN_SIZE, seed=tokens, device=device)
        calls = {
            "eager": lambda given=given: mhc_ops.post_pre_delayed(*given),
            "compiled": lambda given=given: compiled_seam(*given),
        }
        if device == "cuda":
            calls["captured"] = capture(calls["eager"])
        expected = calls["eager"]()

        for output, (error, limit) in testing.errors(given, *expected).items():
            errors.setdefault(output, []).append(f"{error:.1e}")
            if not error <= limit:  # NaN is off too
                problems.append(f"{output} at T = {tokens}: error {error:.1e}, limit {limit:.1e}")
            if tokens == columns[-1]:
                errors[output].append(f"{limit:.1e}")
        for how, call in calls.items():
            equal = same_bits(call(), expected)
            same.setdefault(how, []).append("yes" if equal else "NO")
            if not equal:
                problems.append(f"{how} differs from the first eager call at T = {tokens}")
            times.setdefault(how, []).append(microseconds(seconds(call, device)))
        floor = testing.seam_bytes(tokens, HIDDEN_SIZE) / bandwidth
        times.setdefault("floor", []).append(microseconds(floor))

    heads = [f"T = {tokens}" for tokens in columns]
    times["floor"] = times.pop("floor")  # last
    table("Error against float64", [*heads, "limit"], errors)
    print("  flips: share of elements that are not the nearest bf16; ulp: the largest error")
    table("Same bits as the first eager call", heads, same)
    table("Time of a seam in us", heads, times)
    print(f"  floor: bytes that must move, at the copy bandwidth here, {bandwidth / 1e9:,.0f} GB/s")
    print("  The same inputs each time: small T come from cache. `make bench` times them cold.")
    return problems


def capture(call):
    """A function that replays `call` from a CUDA graph. The warm-up is all that came before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    for output in outputs:
        output.fill_(float("nan"))  # only a replay can make them right

    def replay():
        graph.replay()
        return outputs

    return replay


def same_bits(got, expected):
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def seconds(call, device):
    """Median time of a call. On a GPU 20 calls are timed at a time, as a decode loop makes them."""
    samples = []
    deadline = time.perf_counter() + 0.5
    while len(samples) < 3 or time.perf_counter() < deadline:
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                call()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3 / 20)
        else:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def copy_bandwidth(device):
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)  # larger than any cache
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)


def has_cxx_compiler():
    """Whether inductor will find one: it looks for $CXX, else g++."""
    return shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None


def microseconds(seconds):
    return f"{1e6 * seconds:,.{1 if seconds < 1e-3 else 0}f}"


def line(label, text):
    print(f"  {label:9}{text}")


def table(title, heads, rows):
    print(f"\n{title:35}" + "".join(f"{head:>12}" for head in heads))
    for name, cells in rows.items():
        print(f"  {name:33}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
