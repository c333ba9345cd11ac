"""How the tests call the operators around the whole seam: all of them with one `Given`, too."""

from cases import OPTIONAL, operator, without_post

from mhc_ops import fold_fn
from mhc_ops.ops import Made

MODEL_OPERATORS = ("post_pre_delayed_aux", "expand_pre_delayed", "post", "post_collapse", "gates")
GATES = ("post_mix", "comb_mix", "next_pre_mix")


def names(name):
    return [a.name for a in operator(name)._schema.arguments]


def arguments(name, given):
    """The arguments of an operator or of the function of the same name."""
    if "x" not in names(name):
        return [getattr(given, n) for n in names(name)]
    values = {**given._asdict(), "x": given.sublayer_out, "fn": fold_fn(given.fn)}
    return [values[n] for n in names(name)]


def results(name, function, given):
    """An operator's results as a `Made` with None for what it does not return."""
    found = function(*arguments(name, given))
    found = found if isinstance(found, tuple) else (found,)
    returned = [r.name for r in operator(name)._schema.returns]
    made = dict.fromkeys(Made._fields) | dict(zip(returned, found, strict=True))
    if name == "expand_pre_delayed":
        made["residual_out"] = made.pop("residual")
    return Made(**made)


def judged(name, given, made):
    """(given, outputs) for testing.assert_accurate."""
    if name == "gates":
        return without_post(given), (given.residual, *made[1:])
    if name == "expand_pre_delayed":
        folded = without_post(given)._replace(fn=fold_fn(given.fn), pre_mix=None)
        return folded, (given.sublayer_out.unsqueeze(1), *made[1:])
    return given, made


# (operator, options of make_inputs), every combination that the operator can tell apart.
OPTIONAL_OF = [
    (name, option)
    for name in MODEL_OPERATORS
    for option in OPTIONAL
    if ("pre_mix" in names(name) or option["pre_mix"])
    and ("norm_weight" in names(name) or option["norm_dtype"] is None)
]
