"""DTensor: tokens split over two processes give the unsharded results without communicating."""

import traceback

import pytest
import torch
import torch.distributed as dist
from cases import assert_same_bits

import mhc_ops
import mhc_ops.sharding
from mhc_ops.nn import DelayedSeam, leave
from mhc_ops.registration import read_schemas
from mhc_ops.testing import make_inputs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

PROCESSES = 2
HIDDEN_SIZE = 128
WRITE_AN_INPUT = ("post_pre_delayed_", "post_pre_delayed_out")
OPERATORS = [name for name in read_schemas() if name not in WRITE_AN_INPUT]
WEIGHTS = ("fn", "hc_scale", "hc_base", "norm_weight")
# Floating-point results of the CPU backend depend on where a row lies in its block.
GATE_TOLERANCE = 1e-6


def _arguments(name, given):
    """{argument: value} by the operator's schema."""
    named = {**given._asdict(), "x": given.sublayer_out, "residual_out": given.residual}
    named["ue8m0"] = True
    schema = getattr(torch.ops.mhc, name).default._schema
    if name == "expand_pre_delayed":
        named["fn"] = mhc_ops.fold_fn(given.fn)
    return {a.name: named[a.name] for a in schema.arguments}


def _distributed(named, replicated=()):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    placed = dict(named)
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            whole = name in WEIGHTS or name in replicated
            placed[name] = distribute_tensor(value, mesh, [Replicate() if whole else Shard(0)])
    return placed


def _compare(results, wanted):
    results, wanted = ((r,) if isinstance(r, torch.Tensor) else r for r in (results, wanted))
    for got, want in zip(results, wanted, strict=True):
        assert got.placements[0].is_shard(0)
        if got.dtype.itemsize == 1:  # gloo gathers no float8
            assert_same_bits([got.to_local()], [want.chunk(PROCESSES)[dist.get_rank()]])
            continue
        got = got.full_tensor()
        if got.dtype == torch.bfloat16:
            assert_same_bits([got], [want])
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=GATE_TOLERANCE)


def _check_operator(name, tokens, replicated=()):
    from torch.distributed.tensor.debug import CommDebugMode

    named = _arguments(name, make_inputs(tokens, HIDDEN_SIZE, seed=tokens))
    operator = getattr(torch.ops.mhc, name).default
    placed = _distributed(named, replicated)
    with CommDebugMode() as communication:
        results = operator(**placed)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    _compare(results, operator(**named))


def _check_optional():
    given = make_inputs(4, HIDDEN_SIZE, pre_mix=False, norm_dtype=None)
    results = mhc_ops.post_pre_delayed(*_distributed(given._asdict()).values())
    _compare(results, mhc_ops.post_pre_delayed(*given))


class Layer(DelayedSeam):
    def __init__(self):
        super().__init__(HIDDEN_SIZE)
        self.attn = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        self.ffn = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, x, state):
        h, state = self.seam("attn", x, state)
        h, state = self.seam("ffn", self.attn(h), state)
        return self.ffn(h), state


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return leave(x, state)


def _check_model():
    from torch.distributed.tensor import (
        Shard,
        distribute_module,
        distribute_tensor,
        init_device_mesh,
    )
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)
    model = Model().bfloat16()
    for parameter in model.parameters():
        parameter.normal_(std=HIDDEN_SIZE**-0.5)
    x = torch.randn(6, HIDDEN_SIZE).bfloat16()
    wanted = model(x)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    model = distribute_module(model, mesh)  # every parameter replicated
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with CommDebugMode() as communication:
        hidden = model(placed)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert hidden.placements[0].is_shard(0)
    # The matmuls and the gates may differ in a last bit between three rows and six.
    torch.testing.assert_close(hidden.full_tensor(), wanted, rtol=0.02, atol=0.02)


def _check_no_gather():
    """Fewer tokens than processes: DTensor itself would gather them, silently."""
    for tokens in (0, 1):
        placed = _distributed(make_inputs(tokens, HIDDEN_SIZE)._asdict())
        with pytest.raises(Exception, match=f"T = {tokens} sharded over 2 devices"):
            mhc_ops.post_pre_delayed(*placed.values())
        whole = _distributed(make_inputs(tokens, HIDDEN_SIZE)._asdict(), tuple(placed))
        assert mhc_ops.post_pre_delayed(*whole.values())[0].shape[0] == tokens


def _check_refused(name):
    placed = _distributed(_arguments(name, make_inputs(4, HIDDEN_SIZE)))
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
        getattr(torch.ops.mhc, name).default(**placed)


def _checks():
    for name in OPERATORS:
        for tokens in (2, 5):  # 5: uneven
            yield f"{name} {tokens}", _check_operator, (name, tokens)
    for name in ("post_pre_delayed", "post"):
        yield f"{name} replicated x", _check_operator, (name, 4, ("sublayer_out",))
    yield "no optional inputs", _check_optional, ()
    yield "model", _check_model, ()
    yield "gather", _check_no_gather, ()
    for name in WRITE_AN_INPUT:
        yield name, _check_refused, (name,)


def _process(rank, folder):
    torch.set_num_threads(1)
    mhc_ops.sharding.register()
    mhc_ops.sharding.register()  # nothing happens
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    report = {}
    with torch.no_grad():
        for check, function, args in _checks():
            try:
                function(*args)
                report[check] = None
            except (Exception, pytest.fail.Exception):  # the second: pytest.raises saw none
                report[check] = traceback.format_exc()
    dist.destroy_process_group()
    torch.save(report, folder / f"report{rank}.pt")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """{check: None or what went wrong} from every process. Spawned once: torch takes seconds."""
    folder = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.spawn(_process, args=(folder,), nprocs=PROCESSES)
    return [torch.load(folder / f"report{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("check", [check for check, _, _ in _checks()])
def test_sharded_over_two_processes(report, check):
    for rank in range(PROCESSES):
        assert report[rank][check] is None, report[rank][check]
