"""The base class of attention over the newest tokens of a stream, and its steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nystrom import (
    OUTPUTS,
    StepResult,
)
from ...runtime.checks import as_flag, as_they_are, check_choice, check_count, mismatch
from ...runtime.tracing import has_values
from ..inputs import check_features
from ..multihead.projections import MultiheadProjections
from ..parts import called, computed, is_own
from ..stream import refuse_to_record, with_own_streams
from .rows import Rows, absent_of, cleaned, ready_rows, walked
from .window import ContinualStream, FillingWindow, StaggeredWindow, WindowState


class Continual(MultiheadProjections):
    """Base class of continual attention: a stream of tokens, and the methods that advance the stream.

    The methods have the names of the package continual-inference. One token is (B, C). Several tokens are (B, T, C) or
    (T, B, C), depending on `batch_first`, or (T, C) without a batch. A key or value of None means the query. Before the
    window is full there is no output, and the result is None. A stream holds no autograd graph: a step that would lose
    a gradient raises a `RuntimeError`. Use `torch.no_grad()` for steps, and train with `forward_stream`, which returns
    the same results as the steps. Errors leave the stream unchanged. `_forward_step(token, prev_state=state)` takes and
    returns the state of a stream that the caller keeps; programs can record it.

    The rows of a batch are independent streams. `clean_state(rows)` restarts some of them, and a step with a
    `key_padding_mask` skips rows that have no token. The states of these rows keep their bits. After such a call, and
    until all rows have a full window, a step returns a result for every row: NaN where a row has no token or no full
    window. `ready` tells which windows are full. A row does not change the bits of other rows.
    """

    sequence_len: int
    output: str
    stream: ContinualStream
    _recordable: ClassVar[str]
    """The name, in error messages, of the operator that takes and returns the state of a step."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out, weights) for a whole window: for its last query, or for all queries if retroactive.

        A key or value of None means the query.
        """
        self = computed(self)
        key = query if key is None else key
        value = query if value is None else value
        self._check(None, query=query)  # the check must come before a slice
        query, need_weights = self._asking(query), self._asks_for_weights(need_weights)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def why_torch(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why torch's own implementation runs for such a call of `forward`, or None if the operator runs."""
        return super().why_torch(
            query, query if key is None else key, query if value is None else value, *args, **kwargs
        )

    def forward_step(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        update_state: bool = True,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | None:
        """Take one more token (B, C), and return its output (B, C).

        A retroactive module returns the outputs of the window, in the layout of `forward`. With `update_state=False`
        the stream does not change. `key_padding_mask` (B,) or (B, 1) is True where a row has no token. The result of
        such a row is NaN, and so is the result of a row whose window is not full.
        """
        self = computed(self)
        self._check_given(query, key, value, one=True)
        return self._stepped(query, key, value, update_state, key_padding_mask)

    def _forward_step(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, prev_state: Any = None
    ) -> tuple[Tensor | None, WindowState]:
        """Take one more token (B, C) after a state that the caller keeps. Return the output of `forward_step`, and the
        state after the token.

        `prev_state` is None before the first token, and then a state as `get_state` returns it. The module's own stream
        is neither read nor changed. So a program can record this step, for a full window. The name is that of
        continual-inference.
        """
        self = computed(self)
        self._check_given(query, key, value, one=True)
        if prev_state is not None:
            self.stream.check(prev_state)
        self._refuse_to_drop()
        heads = self._heads_of_one(query, key, value)
        self._check_heads(heads, prev_state)
        state, outs = self._after(prev_state, heads)
        attended = self._gathered(outs)
        return None if attended is None else self._of_one(attended, query), state

    def forward_steps(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        update_state: bool = True,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | None:
        """Take T tokens, and return the results of `forward_step` for them, stacked along the axis of the tokens.

        There are T' <= T results, because tokens have no result before the window is full. For tokens (B, T, C) the
        shape is (B, T', C), or (B, T', n, C) if retroactive. For tokens (T, B, C) it is (T', B, C), or (T', n, B, C) if
        retroactive. With a `key_padding_mask` (B, T), True where a row has no token, T' = T.
        """
        self = computed(self)
        self._check_given(query, key, value)
        absent = absent_of(key_padding_mask, query, self.batch_first)
        self._refuse_to_drop()
        attended = self._advance(self._heads(query, key, value), update_state, absent)
        return None if attended is None else self._joined(attended, batched=query.dim() == 3)

    def forward_stream(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor | None:
        """Return what `forward_steps` of a new stream returns, computed for all tokens at once and with gradients.

        Use this method for training. The module's own stream is neither read nor changed. In training mode, dropout
        applies to the attention weights if the module has dropout. The method uses torch's
        `scaled_dot_product_attention`. On a CPU that function has second-order derivatives and forward-mode derivatives
        only under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
        """
        self = computed(self)
        self._check_given(query, key, value)
        heads = self._heads(query, key, value)
        self._check_heads(heads, None)
        if heads[0].shape[2] < self.sequence_len:
            return None
        attended = self._over_stream(*heads)
        return self._joined(attended if self.output == "retroactive" else attended.squeeze(3), batched=query.dim() == 3)

    def clean_state(self, rows: Rows | None = None) -> None:
        """Forget all tokens, or the tokens of some rows of the batch: an index, several indices, or a bool tensor (B,).

        These rows restart with the next step, and the other rows continue. Before the first token, the batch is not
        known, and there is nothing to forget.
        """
        held = self.stream.held
        if rows is None or held is None:
            self.stream.state = None
        else:
            self.stream.hold(cleaned(self, held, rows))

    @property
    def ready(self) -> Tensor | None:
        """A bool tensor (B,), True for rows of the batch with a full window; None before the first
        token."""
        return ready_rows(self.stream.held, self.sequence_len)

    def get_state(self) -> WindowState | None:
        """Return the state of the stream, or None before the first token.

        The state consists of tensors and ints, which later steps do not change. It is a `FillingWindow` before the
        window is full, and then a `ContinualAttentionState` or `ContinualNystromState` of the operators. It is a
        `StaggeredWindow` while rows have different numbers of tokens, fewer than n in some of them. The next step after
        this call copies the window, in O(n).
        """
        return self.stream.state

    def set_state(self, state: WindowState | None) -> None:
        """Continue from a state that `get_state` returned, after a check and a copy. None acts as `clean_state`."""
        self.stream.state = state

    def _asking(self, query: Tensor) -> Tensor:
        """Return the queries of a window for which `forward` computes outputs. By default these are all queries."""
        return query

    @abstractmethod
    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output (B, H, 1 or n, E) for a whole window, given as heads (B, H, n, *)."""

    @abstractmethod
    def _over_stream(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the outputs (B, H, T - n + 1, 1 or n, E) of a stream of heads (B, H, T, *) with T >= n.

        There is one output after each token from token n on.
        """

    @abstractmethod
    def _init(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """Return the state of a whole window, given as heads (B, H, n, *)."""

    @abstractmethod
    def _step(self, state: Any, query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None = None) -> StepResult:
        """Call the operator with a state and t new tokens, given as heads (B, H, t, *). The rows `absent` (B,) have no
        tokens."""

    __copy__ = with_own_streams

    @abstractmethod
    def _start(self, like: Tensor) -> None:
        """Make the stream, on the device and in the dtype of the weight `like`."""

    def adopt(self, module: torch.nn.MultiheadAttention) -> None:
        super().adopt(module)
        self._start(self._like)

    def _stream_over(self, sequence_len: int, output: str) -> None:
        """Check and store the arguments that all constructors share, and make the stream."""
        self.sequence_len, self.output = check_count("sequence_len", sequence_len), output
        check_choice("output", output, OUTPUTS)
        self._start(self._like)

    def _stepped(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, update_state: bool, mask: Tensor | None = None
    ) -> Tensor | None:
        """Return the result of `forward_step` for a token that was checked before."""
        self._refuse_to_drop()
        absent = None if mask is None else absent_of(mask, query, self.batch_first, one=True)
        attended = self._advance(self._heads_of_one(query, key, value), update_state, absent)
        return None if attended is None else self._of_one(attended, query)

    def _of_one(self, attended: Tensor, query: Tensor) -> Tensor:
        """Return the result of a step from the output for its token, as `_advance` returns it."""
        attended = attended.flatten(1) if self.output == "single" else attended.squeeze(2)
        return self._joined(attended, batched=query.dim() == 2)

    def _advance(self, heads: tuple[Tensor, ...], update_state: bool, absent: Tensor | None = None) -> Tensor | None:
        """Take tokens as heads (B, H, T, D), and return outputs (B, H, T', E), or (B, H, T', n, E) if retroactive.

        `absent` (B, T) is True where a row has no token.
        """
        update_state = as_flag("update_state", update_state)
        refuse_to_record("forward_step", self._recordable)
        stream: Any = self._modules["stream"]  # read directly, for speed: torch's attribute lookup is slow Python code
        held = stream.held
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*self.parameters(recurse=False), *heads)):
            given, advice = (
                "query: it or a weight requires a gradient, but a stream holds no graph",
                "train with forward_stream",
            )
            raise RuntimeError(f"{given}; use torch.no_grad(), or {advice}, which takes a stream as a whole")
        self._check_heads(heads, held, absent)
        tokens = heads[0].shape[2]
        if tokens == 0:
            return None
        # A step does not change the state that it gets, so an error at a later token leaves the stream unchanged. The
        # exception is the capture of a CUDA graph, which advances the state in place.
        state, outs = self._after(held if update_state else stream.state, heads, absent)
        if update_state:
            stream.hold(state)
        return self._gathered(outs)

    def _after(
        self, state: WindowState | None, heads: tuple[Tensor, ...], absent: Tensor | None = None
    ) -> tuple[WindowState, list[Tensor]]:
        """Return the state after T >= 1 tokens as heads, and the list of the outputs of each operator call."""
        with as_they_are(heads[0].device):
            if absent is not None or type(state) is StaggeredWindow:
                return walked(self, state, heads, absent)
            return self._walked(state, heads)

    def _gathered(self, outs: list[Tensor]) -> Tensor | None:
        """Return the outputs of all operator calls along the axis of the tokens, or None."""
        if len(outs) > 1:
            return torch.stack(outs, 2) if self.output == "retroactive" else torch.cat(outs, 2)
        return None if not outs else outs[0].unsqueeze(2) if self.output == "retroactive" else outs[0]

    def _heads_of_one(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        """Return the result of `_heads` for one token (B, C) or (C). Its layout does not depend on `batch_first`."""
        own = self._parameters
        weight = own.get("in_proj_weight")
        alike = (key is None or key is query) and (value is None or value is query)
        if not alike or weight is None or "in_proj_bias" not in own:
            along = -2 if self.batch_first else 0
            return self._heads(
                query.unsqueeze(along), *(None if token is None else token.unsqueeze(along) for token in (key, value))
            )
        packed = F.linear(query, weight, own["in_proj_bias"])
        batch = packed.shape[0] if packed.dim() == 2 else 1
        return self._in_dtype(packed.view(batch, 3, self.num_heads, 1, self.head_dim).unbind(1))

    def _heads(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, H, T, D) in the module's dtype.

        If their inputs are the same tensor, one matrix product computes all three.
        """
        key, value = query if key is None else key, query if value is None else value
        if query is key is value and self.in_proj_weight is not None:
            packed = self._batch_first(F.linear(query, self.in_proj_weight, self.in_proj_bias))
            heads = packed.view(*packed.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        else:
            heads = tuple(self._project(part, features) for part, features in enumerate((query, key, value)))
        return self._in_dtype(heads)

    def _project_pair(
        self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values of a window. If their inputs are the same tensor, one matrix product computes both."""
        weight, bias, first = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if key is not value or key_padding_mask is not None or weight is None or not is_own(weight):
            return super()._project_pair(key, value, key_padding_mask)
        packed = self._batch_first(F.linear(key, weight[first:], None if bias is None else bias[first:]))
        keys, values = packed.view(*packed.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return keys, values, None

    def _in_dtype(self, heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return heads in the module's dtype. Autocast may have computed them in another dtype."""
        dtype = self._like.dtype
        return heads if heads[0].dtype == dtype else tuple(head.to(dtype) for head in heads)

    def _check_given(self, query: Tensor, key: Tensor | None, value: Tensor | None, one: bool = False) -> None:
        """Raise for a wrong type, width, dtype or device of tokens in the layout of `forward`, or of `one` token."""
        key, value = query if key is None else key, query if value is None else value
        alike = query is key is value and self.in_proj_weight is not None
        given = {"query": query} if alike else {"query": query, "key": key, "value": value}
        if one:
            self._check_token(**given)
        else:
            self._check(None, **given)

    def _check_token(self, **token: Tensor) -> None:
        """Raise an error for one token, (B, C) or (C), as `_check` does for several tokens.

        The module later adds an axis to the token. This check comes earlier, so that messages show
        the caller's shape.
        """
        widths = {"query": self.embed_dim, "src": self.embed_dim, "key": self.kdim, "value": self.vdim}
        dims: tuple[int, ...] = (1, 2)
        weight = self._like
        for name, features in token.items():
            check_features(name, features, "(B, C), or (C) for all", dims, widths[name], weight)
            dims = (features.dim(),)

    def _check_heads(self, heads: tuple[Tensor, ...], held: WindowState | None, absent: Tensor | None = None) -> None:
        """Raise if the heads (B, H, T, D) do not fit each other or the stream's state `held`."""
        shape, batch = heads[0].shape, None if held is None else held.keys.shape[0]
        fills = held is None or type(held) is FillingWindow or type(held) is StaggeredWindow
        for name, head in zip(("query", "key", "value"), heads, strict=True):
            if head.shape != shape:
                given, wanted = ((each[0], each[2]) for each in (head.shape, shape))
                raise ValueError(mismatch(name, f"batch and tokens {given}", f"{wanted}, those of query"))
            if batch is not None and shape[0] != batch:
                raise ValueError(
                    mismatch(name, f"batch {shape[0]}", f"batch {batch}, that of the stream; clean_state() ends it")
                )
            # Once the window is full, the operators make this check. On a GPU this check is not made, because it would
            # synchronise.
            if fills and head.device.type == "cpu" and has_values(head) and not _finite(head, absent):
                raise ValueError(
                    mismatch(name, "tokens with a NaN or an infinity before or after the projection", "finite tokens")
                )

    def _walked(self, state: Any, heads: tuple[Tensor, ...]) -> tuple[WindowState, list[Tensor]]:
        """Return the state after T >= 1 tokens, and the list of the outputs (B, H, *, E) of each operator call."""
        outs: list[Tensor] = []
        if state is None or type(state) is FillingWindow:
            before = 0 if state is None else state.queries.shape[2]
            firsts = [head[:, :, : self.sequence_len - before] for head in heads]
            state = FillingWindow(
                *(torch.cat(parts, 2) for parts in zip(*([state] if state else []), firsts, strict=True))
            )
            if state.queries.shape[2] < self.sequence_len:
                return state, outs
            outs.append(self._whole(*state))
            state = self._init(*state)
            heads = tuple(head[:, :, self.sequence_len - before :] for head in heads)
        for block in self._blocks(heads):
            out, state = self._step(state, *block)
            outs.append(out)
        return state, outs

    def _blocks(self, heads: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
        """Split the tokens into blocks of at most `_block`, one for each operator call."""
        tokens = heads[0].shape[2]
        if tokens <= self._block:
            return [heads] if tokens else []
        return zip(*(head.split(self._block, 2) for head in heads), strict=True)

    @property
    def _block(self) -> int:
        """The largest number of tokens in one operator call.

        It is n for single outputs, because the ring buffer grows with the tokens of a call. It is 1 for retroactive
        outputs, because a call returns the window's outputs only after its last token.
        """
        return self.sequence_len if self.output == "single" else 1

    def _joined(self, attended: Tensor, batched: bool) -> Tensor:
        """Return the output projection of (B, H, [T',] [n,] E), or of one token (B, H E).

        The result is (B, [T',] [n,] C) with `batch_first`, else ([T',] [n,] B, C).
        """
        project: Any = self._modules["out_proj"]
        rows = attended if attended.dim() == 2 else attended.movedim(1, -2).flatten(-2)
        out = called(project, rows)
        if not batched:
            return out.squeeze(0)
        return out if self.batch_first or out.dim() == 2 else out.movedim(0, -2)


def _finite(head: Tensor, absent: Tensor | None) -> bool:
    """Whether all tokens of heads (B, H, T, D) are finite, except those that are absent (B, T)."""
    finite = head.isfinite()
    return bool((finite if absent is None else finite | absent[:, None, :, None]).all())
