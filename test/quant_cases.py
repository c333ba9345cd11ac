"""What quantising must give, from float64 and tables, and seams whose layer_input is known."""

import torch
from cases import assert_same_bits

from mhc_ops.testing import make_inputs

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448
POWERS = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))  # by e8m0 code
SCALES = {True: torch.float8_e8m0fnu, False: torch.float32}


def exact(y, ue8m0):
    """(q, scale) of finite y [T, H] bf16 on the CPU, by looking them up."""
    groups = y.double().unflatten(1, (-1, 32))
    top = groups.abs().amax(-1, keepdim=True).clamp_min(torch.tensor(1e-4).double())
    if ue8m0:
        code = torch.searchsorted(448 * POWERS, top)
        scale = POWERS[code]
        stored = code.to(torch.uint8).view(torch.float8_e8m0fnu)
    else:  # twice the digits: rounding the rounded quotient is rounding the quotient
        stored = (top / 448).float()
        scale = stored.double()
    value = (groups / scale).float().double()
    above = torch.searchsorted(E4M3, value.abs()).clamp_max(126)
    below = (above - 1).clamp_min(0)
    to_above, to_below = E4M3[above] - value.abs(), value.abs() - E4M3[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(to_above < to_below, above, torch.where(to_above > to_below, below, even))
    code = code + 128 * value.signbit()
    q = code.to(torch.uint8).view(torch.float8_e4m3fn)
    return q.flatten(1), stored.squeeze(-1)


def assert_same(got, wanted):
    """Bit for bit, except that any NaN is as good as another."""
    for a, b in zip(got, wanted, strict=True):
        a, b = a.cpu(), b.cpu()
        assert a.dtype == b.dtype
        a_nan, b_nan = a.float().isnan(), b.float().isnan()
        assert torch.equal(a_nan, b_nan)
        bits = {1: torch.uint8, 4: torch.int32}[a.element_size()]
        a, b = (t.contiguous().view(bits).masked_fill(a_nan, 0) for t in (a, b))
        assert_same_bits([a], [b])


def carrying(y, **options):
    """A `Given` of one token whose layer_input is y [H] bf16, whatever y is: u is 1 everywhere,
    and so is its norm before it is multiplied by norm_weight."""
    given = make_inputs(1, y.shape[0], pre_mix=False, **options)
    ones = torch.ones_like(given.residual)
    comb = torch.eye(4, device=y.device)[None]
    post = torch.zeros_like(given.post_layer_mix)
    return given._replace(
        residual=ones, comb_res_mix=comb, post_layer_mix=post, norm_weight=y, norm_eps=0.0
    )


def every_maximum():
    """All 32,640 finite magnitudes of bf16, each the largest of a group: [204, 5120]."""
    top = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)[:, None]
    spread = torch.linspace(1, -1, 32)[None] ** 3
    return (top.double() * spread).bfloat16().reshape(-1, 5120)
