"""The seams of a V4.1 decoder layer, as the module that model code inherits from or holds.

    x, state = embeddings, None
    for layer in layers:                                    # class Layer(DelayedSeam)
        h, state = layer.seam("attn", x, state, attn_norm)  # the first one enters
        x = attention(h)
        h, state = layer.seam("ffn", x, state, ffn_norm)
        x = moe(h)
    h = leave(x, state, final_norm)

Whose weights make which gate: the seam in front of a sublayer uses that sublayer's hc_* weights.
From the streams that it has just mixed it makes post_mix and comb_mix for the seam behind the
sublayer, and pre_mix for the *collapse* of the seam behind it. It collapses its own streams with
the pre_mix that came in, which the sublayer before made: V4.1's lag of one sublayer. The first
seam has none and collapses to the embedding; the exit uses the one that the last sublayer made.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import functional, scales
from .checks import GATES, HC_MULT


class SeamState(NamedTuple):
    """What one seam leaves for the next. An overlapped one must be `joined` before other code
    reads its gates, compiled code included; `DelayedSeam.seam` and `leave` do it themselves."""

    residual: Tensor  # [T, 4, H] bf16
    post_mix: Tensor  # [T, 4, 1] fp32
    comb_mix: Tensor  # [T, 4, 4] fp32
    pre_mix: Tensor  # [T, 4] fp32
    # Recorded behind the three gates on the side stream that makes them; None: they are in order.
    ready: torch.cuda.Event | None = None

    def joined(self):
        """The same state with gates that the current stream may read."""
        if self.ready is None:
            return self
        stream = torch.cuda.current_stream(self.residual.device)
        stream.wait_event(self.ready)
        _used_on(stream, self.post_mix, self.comb_mix, self.pre_mix)
        return self._replace(ready=None)


# Exported programs that take or return a state can only be saved, and loaded quietly, with these.
torch.serialization.add_safe_globals([SeamState])
if hasattr(pytree, "_register_namedtuple"):
    pytree._register_namedtuple(SeamState, serialized_type_name="mhc_ops.nn.SeamState")


class DelayedSeam(nn.Module):
    """The seams of one layer, with their weights under the names of V4.1 checkpoints.

    For every name, `hc_{name}_fn` [24, 4*H], `hc_{name}_base` [24] and `hc_{name}_scale` [3] are
    parameters of this very module. A layer that inherits from it has them in its own namespace,
    where checkpoints have them, so that `load_state_dict` and `named_parameters` need no mapping.
    They do not require grad and stay float32 when the module is cast; only their device moves.

    Args:
        hidden_size: H.
        names: one for each sublayer.
        overlap: True: `post_collapse` on the caller's stream and `gates` on a side stream, which
            the next seam (or `leave`) waits for; but the fused operator for more tokens than that
            was faster for (`overlap` in configs/), and in compiled and exported code. A CPU runs
            the two in order. Gates differ from the fused operator's by at most 1e-6. It pays in
            captured graphs: the host starts two operators, and events between them.
        scale_dtype: torch.float8_e8m0fnu or torch.float32: `seam` returns its layer_input as
            (layer_input_q, layer_input_scale) with scales of this type, for an FP8 GEMM. None:
            bf16. The seam between two sublayers is then `post_pre_delayed_quant`, with the same
            bits as what the others do: their own operator, then `quantise`.
    """

    def __init__(
        self,
        hidden_size: int,
        names: tuple[str, ...] = ("attn", "ffn"),
        *,
        rms_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        norm_eps: float = 1e-6,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        overlap: bool = False,
        scale_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if scale_dtype not in (None, torch.float8_e8m0fnu, torch.float32):
            raise ValueError(f"scale_dtype must be float8_e8m0fnu or float32, got {scale_dtype}")
        super().__init__()
        self.names = tuple(names)
        self.constants = (rms_eps, hc_eps, hc_eps, hc_post_mult_value, sinkhorn_repeat)
        self.norm_eps = norm_eps
        self.overlap = overlap
        self.scale_dtype = scale_dtype
        options = {"dtype": torch.float32, "device": device}
        for name in self.names:
            weights = {
                "fn": torch.zeros(GATES, HC_MULT * hidden_size, **options),
                "base": torch.zeros(GATES, **options),
                "scale": torch.ones(3, **options),
            }
            for kind, value in weights.items():
                parameter = nn.Parameter(value, requires_grad=False)
                self.register_parameter(f"hc_{name}_{kind}", parameter)
            # What `fold` makes. Absent until then.
            self.register_buffer(f"hc_{name}_folded", None, persistent=False)

    def seam(
        self,
        name: str,
        x: Tensor | None,
        state: SeamState | None,
        norm_weight: Tensor | None = None,
        *,
        aux: bool = False,
    ):
        """The seam in front of sublayer `name`.

        Args:
            name: of the sublayer that follows.
            x: [T, H] bf16, the output of the sublayer before, or the embeddings. None: the
                streams in `state` are mixed already (`mhc_ops.post`, then edited).
            state: what the seam before returned. None: the model begins here.
            norm_weight: [H], the RMSNorm of the sublayer that follows; None: no norm, which
                scale_dtype does not allow.
            aux: also return the mean of the new streams, for draft models.

        Returns:
            (layer_input, state), and aux if asked for. With scale_dtype, layer_input is a pair.

        Raises:
            ValueError: x and state are of different numbers of tokens, or x, state or
                norm_weight is missing.
                Otherwise as `mhc_ops.functional` says.
        """
        if aux and (x is None or state is None):
            raise ValueError("seam: aux needs both x and state")
        if self.scale_dtype is not None and norm_weight is None:
            raise ValueError("seam: norm_weight is missing; a quantised layer_input is normed")
        if state is None:
            return self._enter(name, x, norm_weight)
        fn, scale, base = self._weights(name)
        gate = (fn, scale, base, *self.constants)
        norm = (norm_weight, self.norm_eps)
        state = state.joined()
        if x is None:
            post, comb, h, pre = functional.pre_delayed(state.residual, *gate, state.pre_mix, *norm)
            return self._quantised(h), SeamState(state.residual, post, comb, pre)
        if not aux and self._overlaps(state.residual):
            return self._overlapped(gate, x, state, norm)
        inputs = (state.residual, *gate, state.pre_mix, x, state.post_mix, state.comb_mix, *norm)
        if aux:
            streams, post, comb, h, pre, mean = functional.post_pre_delayed_aux(*inputs)
            return self._quantised(h), SeamState(streams, post, comb, pre), mean
        if self.scale_dtype is not None:
            ue8m0 = self.scale_dtype != torch.float32
            streams, post, comb, *h, pre = functional.post_pre_delayed_quant(*inputs, ue8m0)
            return tuple(h), SeamState(streams, post, comb, pre)
        streams, post, comb, h, pre = functional.post_pre_delayed(*inputs)
        return h, SeamState(streams, post, comb, pre)

    def fold(self, name: str):
        """Fold the weights of the model's first seam now, not at every call.

        Compiled code that folds at every call may sum in another order and differ in a last bit.
        `load_state_dict` folds again; whoever writes the parameters in another way calls this.
        """
        setattr(self, f"hc_{name}_folded", functional.fold_fn(self._weights(name)[0].detach()))

    def _enter(self, name, x, norm_weight):
        if x is None:
            raise ValueError("seam: x is missing; without state it is the embeddings")
        fn, scale, base = self._weights(name)
        folded = getattr(self, f"hc_{name}_folded")
        if folded is None:
            folded = functional.fold_fn(fn)
        gate = (folded, scale, base, *self.constants)
        streams, post, comb, h, pre = functional.expand_pre_delayed(
            x, *gate, norm_weight, self.norm_eps
        )
        return self._quantised(h), SeamState(streams, post, comb, pre)

    def _quantised(self, h):
        if self.scale_dtype is None:
            return h
        return scales.quantise(h, self.scale_dtype != torch.float32)

    def _overlapped(self, gate, x, state, norm):
        streams, h = functional.post_collapse(
            state.residual, x, state.post_mix, state.comb_mix, state.pre_mix, *norm
        )
        if streams.device.type == "cpu":
            post, comb, pre = functional.gates(streams, *gate)
            return self._quantised(h), SeamState(streams, post, comb, pre)
        side = _side_stream(streams.device)
        side.wait_stream(torch.cuda.current_stream(streams.device))
        with torch.cuda.stream(side):
            post, comb, pre = functional.gates(streams, *gate)
            ready = side.record_event()
        _used_on(side, streams)
        return self._quantised(h), SeamState(streams, post, comb, pre, ready)

    def _overlaps(self, residual):
        # Streams inside a compiled graph cannot be traced.
        if not self.overlap or torch.compiler.is_compiling():
            return False
        return residual.device.type == "cpu" or _overlap_pays(residual)

    def _weights(self, name):
        return tuple(getattr(self, f"hc_{name}_{kind}") for kind in ("fn", "scale", "base"))

    def _apply(self, fn, recurse=True):
        """What .to(), .half() and .cuda() call: for the seams' own tensors the dtype stays."""
        own = (*self._parameters.items(), *self._buffers.items())
        kept = {id(tensor) for key, tensor in own if key in self._own_names()}

        def keep_dtype(tensor):
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        return super()._apply(keep_dtype, recurse)

    def _own_names(self):
        kinds = ("fn", "base", "scale", "folded")
        return {f"hc_{name}_{kind}" for name in self.names for kind in kinds}

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        for name in self.names:
            if getattr(self, f"hc_{name}_folded") is not None:
                self.fold(name)

    def extra_repr(self):
        return f"names={self.names}, overlap={self.overlap}"


def leave(
    x: Tensor, state: SeamState, norm_weight: Tensor | None = None, norm_eps: float = 1e-6
) -> Tensor:
    """The model's exit: the last sublayer's output mixed in, collapsed and normalised, [T, H]."""
    state = state.joined()
    _, hidden = functional.post_collapse(
        state.residual, x, state.post_mix, state.comb_mix, state.pre_mix, norm_weight, norm_eps
    )
    return hidden


def _overlap_pays(residual):
    from . import configs, launch

    tokens, _, hidden = residual.shape
    return configs.lookup(launch.architecture(residual.device.index), hidden, tokens).overlap


@functools.cache
def _side_stream(device):
    """One for each device, made when first needed."""
    return torch.cuda.Stream(device)


def _used_on(stream, *tensors):
    """Keep the memory of tensors of another stream from being reused before `stream` is done.

    Not while capturing, where such memory would not be reused at all: 40 KB a token and seam.
    There the state holds the tensors until the join, and a capture without the join fails.
    """
    if not torch.cuda.is_current_stream_capturing():
        for tensor in tensors:
            tensor.record_stream(stream)
