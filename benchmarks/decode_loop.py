"""A V4.1-Flash-shaped decoder on mhc_ops.nn: eager, compiled, compiled into CUDA graphs, captured.

    python benchmarks/decode_loop.py --out benchmarks/results/decode_loop_h200.json

Every way must give the bits of eager at every step, with no graph break, no recompilation across T
and no skipped CUDA graph; only then is anything timed. Attention and MoE are stand-ins, two
matmuls each: the seams are real, the share of the step that they take is of *this* step. On a CPU
everything is small and only the checks run.

With --quantised also a model whose seams write e4m3 and whose first matmuls read it: by
`torch._scaled_mm` where that takes groups of 32 (sm_100, gfx950), elsewhere multiplied out to
bf16. It prints which.
"""

import argparse
import functools
import time

import harness
import torch
from torch._dynamo.utils import counters

import mhc_ops
from mhc_ops import reference
from mhc_ops.nn import DelayedSeam, SeamState, leave

# Matmuls on bf16 weights and nothing else: the same library calls in eager and compiled, with no
# pointwise neighbours that a compiler could fuse and round differently.
WIDTHS = {"attn": 1024, "ffn": 2048}  # at H = 5120


class Layer(DelayedSeam):
    def __init__(self, hidden, device, quantised):
        super().__init__(hidden, tuple(WIDTHS), device=device)
        for name, width in WIDTHS.items():
            width = width * hidden // 5120
            for kind, shape in (("up", (hidden, width)), ("down", (width, hidden))):
                weight = torch.randn(shape, device=device) * shape[0] ** -0.5
                self.register_buffer(f"{name}_{kind}", weight.bfloat16())
            if quantised:
                self.quantise_up(name)
            norm = 1 + 0.1 * torch.randn(hidden, device=device)
            self.register_buffer(f"{name}_norm", norm.bfloat16())
            getattr(self, f"hc_{name}_fn").normal_(std=(4 * hidden) ** -0.5)
            getattr(self, f"hc_{name}_base").normal_()

    def forward(self, x, state, seam):
        for name in WIDTHS:
            norm = getattr(self, f"{name}_norm")
            h, state = seam(self, name, x, state, norm)
            if isinstance(h, tuple):
                x = self.quantised_up(name, *h)
            else:
                x = torch.mm(h, getattr(self, f"{name}_up"))
            x = torch.mm(x, getattr(self, f"{name}_down"))
        return x, state

    def quantise_up(self, name):
        weight = getattr(self, f"{name}_up").t().contiguous()
        direct = takes_groups_of_32(weight.device)
        q, scale = mhc_ops.quantise(weight, direct)
        self.register_buffer(f"{name}_q", q if direct else multiplied_out(q, scale))
        self.register_buffer(f"{name}_scale", mhc_ops.block_scale(scale) if direct else None)

    def quantised_up(self, name, q, scale):
        weight, weight_scale = getattr(self, f"{name}_q"), getattr(self, f"{name}_scale")
        if weight_scale is None:
            return torch.mm(multiplied_out(q, scale), weight.t())
        return scaled_mm(q, weight, mhc_ops.block_scale(scale), weight_scale)


def scaled_mm(q, weight, scale, weight_scale):
    return torch._scaled_mm(q, weight.t(), scale, weight_scale, out_dtype=torch.bfloat16)


@functools.cache
def takes_groups_of_32(device):
    """Whether torch._scaled_mm does, here: tried, since no version or chip number says it."""
    if device.type == "cpu":
        return False
    q, scale = mhc_ops.quantise(torch.ones(128, 128, dtype=torch.bfloat16, device=device))
    scale = mhc_ops.block_scale(scale)
    try:
        product = scaled_mm(q, q, scale, scale)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool((product == 128).all())


def multiplied_out(q, scale):
    """q * scale, bf16. fp32 scales: inductor has no e8m0."""
    return (q.float().unflatten(1, (-1, 32)) * scale.unsqueeze(-1)).flatten(1).bfloat16()


class Decoder(torch.nn.Module):
    """`seam` and `leave` say what runs between the sublayers; the weights are the same."""

    def __init__(self, depth, hidden, device, quantised):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(hidden, device, quantised) for _ in range(depth))
        self.layers[0].fold("attn")
        self.register_buffer("norm", torch.ones(hidden, device=device, dtype=torch.bfloat16))

    def forward(self, x, kind="fused"):
        seam, leave = SEAMS[kind]
        state = None
        for layer in self.layers:
            x, state = layer(x, state, seam)
        return leave(x, state, self.norm)


def overlapped_seam(layer, name, x, state, norm):
    layer.overlap = True
    try:
        return layer.seam(name, x, state, norm)
    finally:
        layer.overlap = False


def quantised_seam(layer, name, x, state, norm):
    direct = getattr(layer, f"{name}_scale") is not None
    layer.scale_dtype = torch.float8_e8m0fnu if direct else torch.float32
    try:
        return layer.seam(name, x, state, norm)
    finally:
        layer.scale_dtype = None


def reference_seam(layer, name, x, state, norm):
    """The seam as PyTorch model code writes it."""
    fn, scale, base = layer._weights(name)
    if state is None:
        streams, pre_mix = x.unsqueeze(1).expand(-1, 4, -1), None
    else:
        streams = reference.post(state.residual, x, state.post_mix, state.comb_mix)
        pre_mix = state.pre_mix
    h = reference.norm(reference.collapse(streams, pre_mix), norm, layer.norm_eps)
    return h, SeamState(streams, *reference.gates(streams, fn, scale, base, *layer.constants))


def reference_leave(x, state, norm):
    streams = reference.post(state.residual, x, state.post_mix, state.comb_mix)
    return reference.norm(reference.collapse(streams, state.pre_mix), norm, 1e-6)


SEAMS = {
    "fused": (DelayedSeam.seam, leave),
    "overlapped": (overlapped_seam, leave),
    "quantised": (quantised_seam, leave),
    "reference": (reference_seam, reference_leave),
    "none": (lambda layer, name, x, state, norm: (x, state), lambda x, state, norm: x),
}


def captured(step, x):
    """A function that replays the model from a hand-captured CUDA graph."""
    static = x.clone()
    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace per stream, and a recording by inductor frees all of them: only one
    # that was made in this capture, on a stream of its own, lives as long as the graph does.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        hidden = step(static)

    def replay(x):
        static.copy_(x)
        graph.replay()
        return hidden

    return replay


def into_graphs(compiled, x):
    """Compiled with mode="reduce-overhead": a step's output lives until the next step begins."""
    torch.compiler.cudagraph_mark_step_begin()
    return compiled(x)


def ways(model, kind, device):
    """{(kind, how): function of x}; "captured" is added for each T."""

    def step(x):
        return model(x, kind)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    found = {(kind, "eager"): step, (kind, "compiled"): compiled}
    if device == "cuda":
        graphs = torch.compile(step, fullgraph=True, dynamic=True, mode="reduce-overhead")
        found[kind, "reduce-overhead"] = functools.partial(into_graphs, graphs)
    return found


def seconds_a_step(step, inputs, device):
    """Wall time, as a serving loop sees it: what the host cannot hide is in."""

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    for x in inputs[:3]:
        step(x)
    synchronize()
    begin = time.perf_counter()
    for x in inputs:
        step(x)
    synchronize()
    return (time.perf_counter() - begin) / len(inputs)


def check(how, step, inputs, wanted):
    for i, (x, want) in enumerate(zip(inputs, wanted, strict=True)):
        got = step(x)
        if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
            raise SystemExit(f"{how} differs from eager at T = {x.shape[0]}, step {i}")


def share_of_seams(model, kinds, inputs):
    """{kind: (us a step, share of it in seams)} of captured steps. Of the quantised model the
    share is what it would be, had its matmuls taken as long as those in bf16."""
    times = {
        kind: harness.graph_time(functools.partial(model, kind=kind), inputs[:4], replays=5)
        for kind in SEAMS
        if kind != "quantised" or kind in kinds
    }
    without = times.pop("none")
    return {kind: (us, 1 - without / us) for kind, us in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, help="layers of two sublayers; 8, on a CPU 2")
    parser.add_argument("--hidden", type=int, help="5120, on a CPU 256")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 192])
    parser.add_argument("--steps", type=int, help="100, on a CPU 20")
    parser.add_argument("--quantised", action="store_true", help="run the FP8 model as well")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = args.hidden or (5120 if device == "cuda" else 256)
    depth = args.depth or (8 if device == "cuda" else 2)
    steps = args.steps or (100 if device == "cuda" else 20)
    if device == "cpu":
        torch.set_num_threads(1)  # at these sizes more only wait for each other

    torch.manual_seed(0)
    with torch.no_grad():
        kinds = ("fused", "quantised") if args.quantised else ("fused",)
        model = Decoder(depth, hidden, device, args.quantised)
        report = run(model, kinds, args.tokens, steps, hidden, device)
    if args.out:
        where = harness.environment() if device == "cuda" else {"device": "cpu"}
        settings = {"depth": depth, "hidden": hidden, "steps": steps}
        harness.save(args.out, {"environment": where, **settings, **report})


def run(model, kinds, tokens, steps, hidden, device):
    steps_of = {key: step for kind in kinds for key, step in ways(model, kind, device).items()}
    inputs = {
        count: list(torch.randn(steps, count, hidden, device=device).bfloat16()) for count in tokens
    }
    # One T compiles its own graph if it is 1, the first other one compiles for all the rest.
    warm = {min(tokens), *sorted(set(tokens) - {1})[:1]}
    for count in sorted(warm):
        for step in steps_of.values():
            for x in inputs[count][:3]:
                step(x)
    graphs = counters["stats"]["unique_graphs"]

    print(f"{len(model.layers)} layers, H = {hidden}, {steps} steps, {device}\n")
    if "quantised" in kinds:
        direct = takes_groups_of_32(model.norm.device)
        print("quantised: " + ("torch._scaled_mm" if direct else "multiplied out, torch.mm"))
    rows = []
    for count in tokens:
        wanted = {kind: [model(x, kind) for x in inputs[count]] for kind in kinds}
        row = {"tokens": count, "tokens_per_s": {}, "step_us": {}}
        every = dict(steps_of)
        if device == "cuda":
            for kind in kinds:
                eager = steps_of[kind, "eager"]
                every[kind, "captured"] = captured(eager, inputs[count][0])
        for (kind, how), step in every.items():
            check(f"{kind} {how}", step, inputs[count], wanted[kind])
        for key, step in every.items():
            spent = seconds_a_step(step, inputs[count], device)
            how = " ".join(key).removeprefix("fused ")
            row["step_us"][how], row["tokens_per_s"][how] = spent * 1e6, count / spent
        if device == "cuda":
            row["seams"] = share_of_seams(model, kinds, inputs[count])
        rows.append(row)

    counted = {
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations across T": counters["stats"]["unique_graphs"] - graphs,
        "skipped CUDA graphs": counters["inductor"]["cudagraph_skips"],
    }
    table("Tokens a second", {r["tokens"]: r["tokens_per_s"] for r in rows}, "{:,.0f}")
    table("Step in us, launched from Python", {r["tokens"]: r["step_us"] for r in rows}, "{:,.0f}")
    if device == "cuda":
        captured_us = {r["tokens"]: {k: v[0] for k, v in r["seams"].items()} for r in rows}
        shares = {r["tokens"]: {k: v[1] for k, v in r["seams"].items()} for r in rows}
        table("Captured step in us, by what runs the seams", captured_us, "{:,.1f}")
        table("Share of it in seams", shares, "{:.0%}")
    print(f"\nSame bits as eager over {steps} steps at every T: yes")
    for what, count in counted.items():
        print(f"{what}: {count}")
    if any(counted.values()):
        raise SystemExit("the line above must be 0")
    return {"rows": rows, "counted": counted}


def table(title, columns, form):
    """`columns`: {T: {row: number}}."""
    print(f"\n{title:45}" + "".join(f"{f'T = {count}':>12}" for count in columns))
    for name in next(iter(columns.values())):
        cells = "".join(f"{form.format(column[name]):>12}" for column in columns.values())
        print(f"  {name:43}{cells}")


if __name__ == "__main__":
    main()
