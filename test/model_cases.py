"""How the tests call the operators around the whole seam: all of them with one `Given`, too."""

from cases import OPTIONAL, operator, without_post

from mhc_ops import fold_fn
from mhc_ops.ops import Made

MODEL_OPERATORS = (
    "post_pre_delayed_aux", "post_pre_delayed_quant", "expand_pre_delayed", "post",
    "post_collapse", "gates", "quantise",
)  # fmt: skip
GATES = ("post_mix", "comb_mix", "next_pre_mix")


def names(name):
    return [a.name for a in operator(name)._schema.arguments]


def arguments(name, given):
    """The arguments of an operator or of the function of the same name."""
    values = {**given._asdict(), "ue8m0": True}
    if "x" in names(name):
        values |= {"x": given.sublayer_out, "fn": fold_fn(given.fn)}
    return [values[n] for n in names(name)]


def results(name, function, given):
    """An operator's results as a `Made` with None for what it does not return."""
    found = function(*arguments(name, given))
    found = found if isinstance(found, tuple) else (found,)
    returned = [r.name for r in operator(name)._schema.returns]
    fields = {"residual": "residual_out", "layer_input_q": "layer_input"}
    returned = [fields.get(n, n) for n in returned]
    return Made(**dict.fromkeys(Made._fields) | dict(zip(returned, found, strict=True)))


def judged(name, given, made):
    """(given, outputs) for testing.assert_accurate."""
    if name == "gates":
        return without_post(given), (given.residual, *made[1:6])
    if name == "expand_pre_delayed":
        folded = without_post(given)._replace(fn=fold_fn(given.fn), pre_mix=None)
        return folded, (given.sublayer_out.unsqueeze(1), *made[1:6])
    if name == "quantise":
        return without_post(given), (None,) * 6
    if name == "post_pre_delayed_quant":  # what is quantised has tests of its own
        return given, made._replace(layer_input=None)[:6]
    return given, made[:6]


def tells_apart(name, option):
    """Whether an operator takes these options of make_inputs, and not others with one result."""
    types = {a.name: str(a.type) for a in operator(name)._schema.arguments}
    norm, given = types.get("norm_weight"), option["norm_dtype"] is not None
    norm_fits = norm == "Optional[Tensor]" or given == (norm == "Tensor")
    return norm_fits and ("pre_mix" in types or option["pre_mix"])


OPTIONAL_OF = [
    (name, option) for name in MODEL_OPERATORS for option in OPTIONAL if tells_apart(name, option)
]
