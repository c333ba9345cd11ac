"""How the tests call the operators: all of them with one `Given`, on copies of what they write."""

import itertools

import torch

OPERATORS = ("post_pre_delayed", "post_pre_delayed_", "post_pre_delayed_out", "pre_delayed")
POST_INPUTS = ("sublayer_out", "post_layer_mix", "comb_res_mix")
PER_TOKEN = ("residual", *POST_INPUTS, "pre_mix")
# Every combination of optional inputs, for make_inputs.
OPTIONAL = [
    {"pre_mix": pre_mix, "norm_dtype": norm_dtype}
    for pre_mix, norm_dtype in itertools.product(
        (True, False), (None, torch.bfloat16, torch.float32)
    )
]


def label(value):
    """A pytest id for an entry of OPTIONAL."""
    gate = "pre_mix" if value["pre_mix"] else "stream0"
    return f"{gate}-{str(value['norm_dtype']).removeprefix('torch.')}"


def operator(name):
    return getattr(torch.ops.mhc, name).default


def arguments(name, given):
    """(args, kwargs) for an operator or the function of the same name."""
    named = given._asdict()
    if name == "pre_delayed":
        for post_input in POST_INPUTS:
            del named[post_input]
    if name.endswith("_"):
        named["residual"] = given.residual.clone()
    kwargs = {}
    if name.endswith("_out"):
        kwargs["residual_out"] = torch.full_like(given.residual, torch.nan)
    return list(named.values()), kwargs


def call(function, args, kwargs):
    """The five results, streams first, of any operator or function of `arguments`."""
    results = function(*args, **kwargs)
    if len(results) == 5:
        return tuple(results)
    return (kwargs.get("residual_out", args[0]), *results)


def seam(name, given):
    """The five results of an operator, streams first. `given` is not written."""
    return call(operator(name), *arguments(name, given))


def without_post(given):
    return given._replace(**dict.fromkeys(POST_INPUTS))


def judged(name, given):
    """What testing.assert_accurate should judge an operator's results by."""
    return without_post(given) if name == "pre_delayed" else given


def map_tensors(function, given):
    """`given` with a function applied to every tensor."""
    return type(given)(*(function(v) if isinstance(v, torch.Tensor) else v for v in given))


def map_tokens(function, given):
    """`given` with a function applied to every tensor that has a T."""
    present = {k: getattr(given, k) for k in PER_TOKEN if getattr(given, k) is not None}
    return given._replace(**{k: function(v) for k, v in present.items()})


def repeated(given, tokens):
    """`given` over and over up to that many tokens, its own last ones the last."""

    def last(tensor):
        copies = -(-tokens // tensor.shape[0])
        return tensor.repeat(copies, *[1] * (tensor.dim() - 1))[-tokens:].contiguous()

    return map_tokens(last, given)


def assert_same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        assert torch.equal(a.contiguous().view(width), b.contiguous().view(width))
