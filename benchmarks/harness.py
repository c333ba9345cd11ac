"""Timing shared by the benchmarks: graph replay, cold L2, the copy ceiling."""

import datetime
import json
import pathlib
import statistics

import torch
import triton

import mhc_ops
from mhc_ops.testing import make_inputs, seam_bytes

RESULTS = pathlib.Path(__file__).with_name("results")


def rotating_inputs(tokens, hidden_size, **options):
    """Enough `Given`s that one round over them is twice the L2: every call finds its cold."""
    count = _past_l2(seam_bytes(tokens, hidden_size))
    # Seeds beyond a few only cost time on the host; clones have addresses of their own.
    first = [
        make_inputs(tokens, hidden_size, seed=seed, device="cuda", **options)
        for seed in range(min(count, 4))
    ]
    return [first[0]._make(map(_clone, first[i % len(first)])) for i in range(count)]


def rotating_launches(step):
    """The same of a `launch.Launch` that has run."""
    count = _past_l2(sum(a.nbytes for a in step.args if isinstance(a, torch.Tensor)))
    return [step._replace(args=tuple(map(_clone, step.args))) for _ in range(count)]


def _past_l2(size):
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(64, 2 * l2 // size + 1))


def _clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def graph_time(call, inputs, replays=25, least_us=500.0):
    """Median time of one call in us, from replays of a CUDA graph that calls every input."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        call(inputs[0])
        stream.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(inputs[0])
        end.record()
        stream.synchronize()
        rounds = max(1, round(least_us / (begin.elapsed_time(end) * 1e3 * len(inputs))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for given in inputs:
                    call(given)
        graph.replay()
        times = []
        for _ in range(replays):
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(inputs)))
    return statistics.median(times)


def copy_bandwidth(gigabytes=4, repeats=10):
    """Device-to-device copy in GB/s, counting bytes read and written: the ceiling.

    Outside a graph: a captured copy becomes a copy-engine node, a third slower.
    """
    source = torch.empty(gigabytes * 2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) / 1e6


def environment():
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "mhc_ops": mhc_ops.__version__,
        "date": datetime.date.today().isoformat(),
    }


def save(path, results):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
