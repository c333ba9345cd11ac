"""The tolerances catch the faults that they are there for."""

import pytest
import torch
from cases import seam

from mhc_ops import reference, testing
from mhc_ops.testing import assert_accurate, make_inputs

GATE = ("fn", "hc_scale", "hc_base", "rms_eps", "hc_pre_eps", "hc_sinkhorn_eps")
GATE += ("hc_post_mult_value", "sinkhorn_repeat")


def tf32(tensor):
    """Rounded to 10 bits behind the point."""
    bits = tensor.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def truncated(values):
    """fp32 to bf16 without rounding to nearest."""
    return (values.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def gates(given, streams):
    return reference.gates(streams, *(getattr(given, name) for name in GATE))


def with_gates(outputs, gates):
    post_mix, comb_mix, next_pre_mix = gates
    return outputs[0], post_mix, comb_mix, outputs[3], next_pre_mix


def gates_of(**replaced):
    def faulty(given, outputs):
        changed = {k: v(getattr(given, k)) for k, v in replaced.items()}
        return with_gates(outputs, gates(given._replace(**changed), outputs[0]))

    return faulty


def unrounded_streams(given, outputs):
    return with_gates(outputs, gates(given, testing.exact_streams(given).float()))


def bf16_gates(given, outputs):
    return with_gates(outputs, [o.bfloat16().float() for o in (outputs[1], outputs[2], outputs[4])])


def comb_input_transposed(given, outputs):
    return seam("post_pre_delayed", given._replace(comb_res_mix=given.comb_res_mix.mT.contiguous()))


def comb_output_transposed(given, outputs):
    return with_gates(outputs, (outputs[1], outputs[2].mT, outputs[4]))


def truncated_streams(given, outputs):
    streams = truncated(testing.exact_streams(given))
    return streams, *seam("pre_delayed", given._replace(residual=streams))[1:]


def layer_input(given, u, norm_eps=None, factor=1.0):
    return reference.norm(u, given.norm_weight.float() * factor, norm_eps or given.norm_eps)


def unrounded_collapse(given, outputs):
    """Normalises the exact sum: the contract's second rounding is skipped."""
    u = torch.einsum("tj,tjh->th", given.pre_mix, outputs[0].float())
    return (*outputs[:3], layer_input(given, u), outputs[4])


def half_the_squares(given, outputs):
    u = reference.collapse(outputs[0], given.pre_mix)
    return (*outputs[:3], layer_input(given, u, factor=2**0.5), outputs[4])


def truncated_layer_input(given, outputs):
    u = reference.collapse(outputs[0], given.pre_mix).float()
    scale = torch.rsqrt(u.square().mean(-1, keepdim=True) + given.norm_eps)
    return (*outputs[:3], truncated(u * scale * given.norm_weight.float()), outputs[4])


def one_nan(given, outputs):
    bad = outputs[2].clone()
    bad[-1, 0, 0] = torch.nan
    return with_gates(outputs, (outputs[1], bad, outputs[4]))


def one_element_of_streams(given, outputs):
    streams = outputs[0].clone()
    streams[-1, -1, -1] += 0.25
    return streams, *seam("pre_delayed", given._replace(residual=streams))[1:]


FAULTS = {
    "W in TF32": gates_of(fn=tf32),
    "W in bf16": gates_of(fn=lambda fn: fn.bfloat16().float()),
    "mean of squares over H": gates_of(fn=lambda fn: fn / 2),
    "19 iterations": gates_of(sinkhorn_repeat=lambda n: n - 1),
    "21 iterations": gates_of(sinkhorn_repeat=lambda n: n + 1),
    "hc_pre_eps of 1e-4": gates_of(hc_pre_eps=lambda eps: eps + 1e-4),
    "unrounded R'": unrounded_streams,
    "gates in bf16": bf16_gates,
    "comb transposed going in": comb_input_transposed,
    "comb transposed coming out": comb_output_transposed,
    "R' truncated": truncated_streams,
    "collapse not rounded": unrounded_collapse,
    "half of the squares": half_the_squares,
    "layer_input truncated": truncated_layer_input,
    "one NaN": one_nan,
    "one wrong element": one_element_of_streams,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(seed, fault):
    # The scale at which a trained model's gates are sharp; Sinkhorn converges slowly there.
    given = make_inputs(64, 512, seed=seed, hc_scale=10)
    outputs = seam("post_pre_delayed", given)
    assert_accurate(given, outputs)
    faulty = FAULTS[fault](given, outputs)
    with pytest.raises(AssertionError, match="out of tolerance"):
        assert_accurate(given, faulty)
