"""Thousands of mixed calls from several threads and streams: same bits, flat memory.

    python test/soak.py                                  # 10,000 calls, then T = 110,000
    compute-sanitizer --tool memcheck python test/soak.py --calls 60 --max-tokens 300 --large 0
    compute-sanitizer --tool racecheck ...               # initcheck as well

On a CPU it is small and shows that the script itself works.
"""

import argparse
import random
import resource
import threading

import model_cases
import torch
from cases import OPERATORS, operator, repeated, seam

from mhc_ops.testing import assert_accurate, make_inputs


def results(name, given):
    """All that an operator returns, and the streams that it writes."""
    if name in OPERATORS:
        return seam(name, given)
    return [r for r in model_cases.results(name, operator(name), given) if r is not None]


def wrong_bytes(got, wanted):
    """How many differ, on the device."""
    return sum(
        (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
        for a, b in zip(got, wanted, strict=True)
    )


class Soak:
    def __init__(self, device, hidden, max_tokens, threads, seed):
        self.device = device
        self.random = random.Random(seed)
        sizes = {1, max_tokens, *(int(max_tokens ** self.random.random()) for _ in range(22))}
        self.given = {t: make_inputs(t, hidden, seed=t, device=device) for t in sorted(sizes)}
        self.wanted = {
            (name, t): [r.clone() for r in results(name, given)]
            for t, given in self.given.items()
            for name in (*OPERATORS, *model_cases.MODEL_OPERATORS)
        }
        # Kept: each has a pool of memory of its own.
        self.streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(threads)]
        self.wrong, self.failures = [], []

    def calls(self, count, seed):
        """`count` calls; one in ten is compared."""
        choose = random.Random(seed)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for i in range(count):
            name, t = choose.choice(list(self.wanted))
            got = results(name, self.given[t])
            if i % 10 == 0:
                wrong += wrong_bytes(got, self.wanted[name, t])
        self.wrong.append(int(wrong))

    def on_a_stream(self, stream, count, seed):
        try:
            with torch.no_grad(), torch.cuda.stream(stream):  # None: nothing
                self.calls(count, seed)
        except Exception as failure:
            self.failures.append(failure)

    def run(self, count):
        """`count` calls in threads; bytes that the device and this process held at most."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        started = [
            threading.Thread(
                target=self.on_a_stream,
                args=(stream, count // len(self.streams), self.random.random()),
            )
            for stream in self.streams
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if self.failures:
            raise self.failures[0]
        assert self.wrong == [0] * len(self.wrong), f"{sum(self.wrong)} bytes differ"
        on_device = torch.cuda.memory_reserved() if self.device == "cuda" else 0
        return on_device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def large(tokens, hidden):
    """T * 4 * H past 2^31: the last tokens are right by themselves."""
    last = 64
    given = make_inputs(last, hidden, seed=1, device="cuda")
    results = seam("post_pre_delayed", repeated(given, tokens))
    assert_accurate(given, [r[-last:] for r in results])


def main():
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000 if gpu else 200)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=5120 if gpu else 256)
    parser.add_argument("--max-tokens", type=int, default=8192 if gpu else 64)
    parser.add_argument("--large", type=int, default=110_000 if gpu else 0, help="0: not at all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with torch.no_grad():
        device = "cuda" if gpu else "cpu"
        soak = Soak(device, args.hidden, args.max_tokens, args.threads, args.seed)
        print(f"{len(soak.wanted)} operators and sizes, up to T = {max(soak.given):,}", flush=True)
        # The first half fills every stream's pool; from then on nothing more may be needed.
        half = soak.run(args.calls // 2)
        end = soak.run(args.calls - args.calls // 2)
        print(f"{args.calls:,} calls in {args.threads} threads: same bits")
        for where, before, after in zip(("device", "host"), half, end, strict=True):
            print(f"{where}: {after / 2**30:.2f} GiB held")
            assert after <= 1.1 * before, f"{where} memory grew from {before:,} to {after:,} bytes"
        if args.large:
            large(args.large, args.hidden)
            print(f"T = {args.large:,}: right")


if __name__ == "__main__":
    main()
