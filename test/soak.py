"""Thousands of mixed calls from several threads and streams: same bits, flat memory.

    python test/soak.py                                  # 10,000 calls, then T = 110,000
    compute-sanitizer --tool memcheck python test/soak.py --calls 60 --max-tokens 300 --large 0
    compute-sanitizer --tool racecheck ...               # initcheck as well

On a CPU it is small and shows that the script itself works.
"""

import argparse
import random
import threading

import torch
from cases import OPERATORS, seam

from mhc_ops.testing import assert_accurate, make_inputs


def wrong_bits(got, wanted):
    """How many elements differ, on the device."""
    return sum(
        (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
        for a, b in zip(got, wanted, strict=True)
    )


def memory(device):
    return torch.cuda.memory_reserved() if device == "cuda" else 0


class Soak:
    def __init__(self, device, hidden, max_tokens, seed):
        self.device = device
        self.random = random.Random(seed)
        sizes = {1, max_tokens, *(int(max_tokens ** self.random.random()) for _ in range(22))}
        self.given = {t: make_inputs(t, hidden, seed=t, device=device) for t in sorted(sizes)}
        self.wanted = {
            (name, t): [r.clone() for r in seam(name, given)]
            for t, given in self.given.items()
            for name in OPERATORS
        }
        self.wrong, self.failures = [], []

    def calls(self, count, seed):
        """`count` calls on a stream of this thread's own; one in ten is compared."""
        choose = random.Random(seed)
        try:
            wrong = torch.zeros((), dtype=torch.int64, device=self.device)
            for i in range(count):
                name, t = choose.choice(list(self.wanted))
                got = seam(name, self.given[t])
                if i % 10 == 0:
                    wrong += wrong_bits(got, self.wanted[name, t])
            self.wrong.append(int(wrong))
        except Exception as failure:
            self.failures.append(failure)

    def on_a_stream(self, count, seed):
        if self.device == "cpu":
            return self.calls(count, seed)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            self.calls(count, seed)
        stream.synchronize()

    def run(self, count, threads):
        """All calls in `threads` threads; the most memory that was held after."""
        started = [
            threading.Thread(target=self.on_a_stream, args=(count // threads, self.random.random()))
            for _ in range(threads)
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if self.failures:
            raise self.failures[0]
        assert self.wrong == [0] * len(self.wrong), f"{sum(self.wrong)} bytes differ"
        return memory(self.device)


def large(tokens, hidden):
    """T * 4 * H past 2^31: the last tokens are right by themselves."""
    last = 64
    given = make_inputs(last, hidden, seed=1, device="cuda")
    per_token = ("residual", "sublayer_out", "post_layer_mix", "comb_res_mix", "pre_mix")
    many = {
        key: getattr(given, key).repeat(-(-tokens // last), *[1] * (getattr(given, key).dim() - 1))
        for key in per_token
    }
    many = given._replace(**{key: value[-tokens:].contiguous() for key, value in many.items()})
    results = seam("post_pre_delayed", many)
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
        soak = Soak("cuda" if gpu else "cpu", args.hidden, args.max_tokens, args.seed)
        print(f"{len(soak.wanted)} operators and sizes, up to T = {max(soak.given):,}", flush=True)
        # The first half fills every stream's pool; from then on nothing more may be needed.
        half = soak.run(args.calls // 2, args.threads)
        end = soak.run(args.calls - args.calls // 2, args.threads)
        print(
            f"{args.calls:,} calls in {args.threads} threads: same bits; held {end / 2**30:.2f} GiB"
        )
        assert end <= 1.1 * half, f"memory grew from {half:,} to {end:,} bytes"
        if args.large:
            large(args.large, args.hidden)
            print(f"T = {args.large:,}: right")


if __name__ == "__main__":
    main()
