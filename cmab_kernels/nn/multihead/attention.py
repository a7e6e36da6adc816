"""`torch.nn.MultiheadAttention` on the fused operator, and as a stream."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...attention import AttentionState, attention_state
from ...runtime.backends import has_kernel
from ...runtime.checks import as_flag, mismatch
from ..inputs import ADDITIVE, DROPOUT, NO_ATTENTION_MASK, bool_mask, check_floating, is_additive, split_heads
from ..parts import computed
from . import torchs_attention
from .projections import MultiheadProjections


class Attended(NamedTuple):
    """The return value of `MultiheadAttention.attend_state`: the output, and the state to continue from."""

    out: Tensor
    """The output, in the shape and dtype of the query."""
    state: AttentionState
    """The state of the inputs, before the output projection: out (B, H, L, embed_dim / H) and lse (B, H, L)."""


class MultiheadAttention(MultiheadProjections):
    """`torch.nn.MultiheadAttention`, fast and with little memory for few queries over many keys.

    Constructor, parameters, `state_dict`, arguments and result of `forward` are those of torch's module; see its
    documentation for shapes. The fused operator runs for calls that do not request the attention matrix: calls with
    `need_weights=False`, no `attn_mask`, no dropout (p 0, or eval mode), and a `key_padding_mask` that is None, bool,
    or a float mask of 0 and -inf. torch's transformer layers convert bool masks to such float masks. All other calls
    run torch's own implementation, with torch's memory and speed: calls with `need_weights=True` (torch's default!),
    with an `attn_mask` with or without `is_causal`, with a `key_padding_mask` that holds other numbers or requires a
    gradient, with dropout in training, with nested tensors, and with heads or devices that have no kernel. `why_torch`
    says whether torch's implementation runs, and why.

    There are four differences from torch. First, a query whose keys are all masked gets 0 before the output projection
    on the fused path, where torch gives NaN. Second, `is_causal=True` without an `attn_mask` raises a `ValueError`.
    (torch raises too, except in its fast path, which ignores `is_causal`.) Third, the numbers of a float
    `key_padding_mask` are not read on a GPU or under a compiler. Numbers other than 0 and -inf there make every result
    NaN, or raise a `RuntimeError` in a compiled call. Fourth, if you put this module into a
    `torch.nn.TransformerEncoderLayer` by hand, the layer does not call the module in eval mode without gradients: it
    runs torch's own fused layer. After `replace_modules` the layer calls this module.

    A wrong shape, dtype or device raises a `ValueError` or `TypeError` that names the argument. Source: Attention Is
    All You Need (Vaswani et al., 2017), section 3.2.2.

    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> ours = cmab_kernels.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> query, points = torch.randn(1, 4, 16), torch.randn(1, 100, 16)
    >>> torch.allclose(ours(query, points, points, need_weights=False)[0], theirs(query, points, points)[0], atol=1e-5)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out, weights) as torch does; weights is None for `need_weights=False`.

        The class docstring says when the kernel runs. `need_weights=None` means the attribute of that name: True as in
        torch, unless `replace_modules` was given another value.
        """
        self = computed(self)
        check_floating(self, query=query, key=key, value=value)
        need_weights = self._asks_for_weights(need_weights)
        average_attn_weights = as_flag("average_attn_weights", average_attn_weights)
        is_causal = as_flag("is_causal", is_causal)
        if is_causal and attn_mask is None:
            raise ValueError(
                mismatch(
                    "is_causal",
                    "True without an attn_mask",
                    "False, because is_causal only describes the attn_mask; or pass the mask as well",
                )
            )
        if self.why_torch(query, key, value, key_padding_mask, need_weights, attn_mask) is not None:
            theirs = partial(
                MultiheadProjections.forward if torchs_attention.is_as_made(self) else torchs_attention.forward, self
            )
            return theirs(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        ignore, read = bool_mask(key_padding_mask, key)
        self._check(ignore, query=query, key=read, value=value)
        return self._attend(query, read, value, None, ignore).out, None

    def why_torch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> str | None:
        """Return why torch's own implementation runs for such a call, or None if the operator runs."""
        if self._asks_for_weights(need_weights):
            return "need_weights is True, torch's default, so the matrix of weights is needed"
        if attn_mask is not None:
            return NO_ATTENTION_MASK
        if self._drops:
            return DROPOUT
        if query.is_nested:
            return "a nested tensor has no fused attention"
        if is_additive(key_padding_mask):
            return ADDITIVE
        heads = query.new_empty(1, self.num_heads, 1, self.head_dim)
        return None if has_kernel("attention", heads, heads, heads) else "no kernel runs here for such heads"

    def attend_state(
        self,
        query: Tensor,
        inputs: Tensor,
        state: AttentionState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> Attended:
        """Attend to a stream in time O(new inputs). `state` summarises the past inputs, and `inputs` are the new ones.

        `inputs` are used as keys and as values. `query`, `inputs` and `key_padding_mask` (bool only) have the same
        shapes as in `forward`. The queries must be the same at every call. `state` is the state of the previous result,
        or None at the start. Streaming equals `forward` over all inputs at once, for any division into chunks, and
        gradients flow through the chain of states. The keys of `add_bias_kv` and `add_zero_attn` count in the output
        but not in the state, so that states can be merged. `decay` reduces the weight of the inputs
        of `state`, as in `cmab_kernels.attention_state`. A `ValueError` is raised if kdim and vdim
        differ, and a `RuntimeError` if dropout would apply.

        >>> attention = cmab_kernels.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> query, points, state = torch.randn(1, 4, 16), torch.randn(1, 100, 16), None
        >>> for chunk in points.split(30, dim=1):
        ...     out, state = attention.attend_state(query, chunk, state)
        >>> torch.allclose(out, attention(query, points, points, need_weights=False)[0], atol=1e-5)
        True
        """
        self = computed(self)
        if self.kdim != self.vdim:
            raise ValueError(
                mismatch(
                    "inputs",
                    f"one tensor for keys and values with kdim = {self.kdim} and vdim = {self.vdim}",
                    "a module with kdim = vdim",
                )
            )
        self._refuse_to_drop()
        self._check(key_padding_mask, query=query, inputs=inputs)
        return self._attend(query, inputs, inputs, state, key_padding_mask, decay)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: AttentionState | None,
        key_padding_mask: Tensor | None,
        decay: float | Tensor | None = None,
    ) -> Attended:
        q = self._project(0, query)
        state = self._read(q, key, value, state, key_padding_mask, decay)
        return Attended(self._answer(q, state, query), state)

    def _read(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        state: AttentionState | None,
        key_padding_mask: Tensor | None,
        decay: float | Tensor | None = None,
    ) -> AttentionState:
        """Return the state of queries (B, H, L, D) with these keys and values added."""
        k, v, mask = self._project_pair(key, value, key_padding_mask)
        return attention_state(q, k, v, state=state, decay=decay, key_padding_mask=mask)

    def _answer(self, q: Tensor, state: AttentionState, query: Tensor) -> Tensor:
        """Return the output from the state of queries (B, H, L, D), in the layout of `query`."""
        return self._output(self._over_extra_keys(q, state).out.to(q.dtype), query)

    def _over_extra_keys(self, query: Tensor, state: AttentionState) -> AttentionState:
        """Return the state with the learned key (`add_bias_kv`) and the zero key (`add_zero_attn`) added.

        A key is added only if the module has it.
        """
        pairs = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            zeros = query.new_zeros(1, 1, self.embed_dim)
            pairs.append((zeros, zeros))
        for pair in pairs:
            key, value = (split_heads(row, self.num_heads).expand(query.shape[0], -1, -1, -1) for row in pair)
            state = attention_state(query, key, value, state=state)
        return state
