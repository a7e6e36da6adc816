"""The states of all prefixes under the suite that every operator inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.attention.prefix.reference import beyond_prefix, each_prefix
from cmab_kernels.testing import Measured, OperatorSuite, oracles

Results = tuple[Tensor, ...]


def _states(
    query: Tensor, key: Tensor, value: Tensor, every: int, mask: Tensor | None = None
) -> list[ck.AttentionState]:
    """Return the states as a loop would compute them: each by the definition of attention, over all keys up to its
    prefix."""
    stops = [min(stop + every, key.shape[2]) for stop in range(0, key.shape[2], every)]
    parts = ((key[:, :, :stop], value[:, :, :stop], None if mask is None else mask[:, :stop]) for stop in stops)
    return [ck.AttentionState(*oracles.attention(query, *part)) for part in parts]


def _stacked(query: Tensor, states: list[ck.AttentionState], width: int) -> Results:
    if not states:
        none = query.double().sum(-1).unsqueeze(2).narrow(2, 0, 0)
        return none.unsqueeze(-1).expand(*none.shape, width), none
    out, lse = (torch.stack(parts, 2) for parts in zip(*states, strict=True))
    return out, lse


class TestPrefixStates(OperatorSuite):
    """`prefix_attention_states` with chunks that do not fit into tiles, and a shorter last chunk."""

    operator = "prefix_attention_states"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE"}
    outputs = ("out", "lse")
    logits = (("query",), ("key",))
    extents = {"B": 2, "H": 3, "L": 5, "N": 133, "D": 16, "E": 7}
    small = {"H": 2, "L": 3, "N": 5, "D": 4, "E": 3}
    shapes = (
        {"H": 2, "N": 400, "E": 16},
        {"L": 33, "N": 197, "D": 8, "E": 24},
        {"H": 1, "L": 128, "N": 130, "D": 64, "E": 64},
    )
    impls = ("reference", "native")
    repeatable = ("native",)
    repeats = 100
    empty = "BHLN"
    mask = "key_padding_mask"
    bits = tuple(
        {"B": 3, "H": 2, "L": latents, "N": keys, "E": 16} for latents, keys in ((128, 500), (5, 2000), (300, 100))
    )
    many = {"B": 66_000, "H": 1, "L": 1, "N": 3, "D": 2, "E": 2}
    autocast = ("query", "key", "value")
    accepted = ("query of a dimension too few",)
    every = 3

    def call(self, impl: str, **inputs: Any) -> Results:
        return tuple(ck.prefix_attention_states(**inputs, every=self.every, impl=impl))

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        return _stacked(query, _states(query, key, value, self.every, key_padding_mask), value.shape[-1])

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        prefixes = -(-key.shape[2] // self.every)
        rows = (each_prefix(rows, prefixes) for rows in (query, key, value))
        seen = ~beyond_prefix(key, None, self.every)[:, None, None]
        out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=seen)
        out = out.unflatten(0, (-1, prefixes)).transpose(1, 2)
        return out, out.new_zeros(out.shape[:-1], dtype=torch.float64)

    def huge_inputs(
        self, dtype: torch.dtype, order: str, extents: Mapping[str, int] | None = None
    ) -> dict[str, Tensor]:
        """Return logits that are far apart, even among the smallest, which have weight in the first prefixes.

        float16 has few digits for such logits.
        """
        if dtype != torch.float16:
            return super().huge_inputs(dtype, order, extents)
        inputs = super().huge_inputs(dtype, order, {"N": 18})
        return {**inputs, "query": 2**5 * inputs["query"]}

    def incoming(self, results: Results) -> Results:
        """Return the gradients of a mean over prefixes. The gradient of `lse` is 0, because torch's attention has no
        `lse` with a gradient."""
        out, *lse = results
        return torch.randn(out.shape) / out.shape[2], *(torch.zeros_like(t) for t in lse)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], inputs["key"])

    def row_sizes(self, found: Measured) -> Tensor:
        """Measure the rows of gradients relative to the terms that they add up, over keys and prefixes, because these
        may cancel."""
        size = found.right.norm(dim=-1)
        if not found.is_gradient:
            return size
        query, key, value = (found.inputs[name] for name in ("query", "key", "value"))
        stops = range(self.every, key.shape[2] + self.every, self.every)
        total = torch.zeros_like(found.right)
        for dout, stop in zip(found.cotangents[0].double().unbind(2), stops, strict=True):
            given = (query, key[:, :, :stop], value[:, :, :stop])
            terms = dict(
                zip(
                    ("query", "key", "value"),
                    oracles.attention_terms(dout, *given, *oracles.attention(*given)),
                    strict=True,
                )
            )
            total[:, :, : terms[found.name].shape[2]] += terms[found.name]
        term = total.norm(dim=-1)
        return torch.maximum(size, 0.05 * term).clamp(min=1e-30 * float(term.max()))

    def check_rows(self, found: Measured) -> None:
        """Check `lse` by its absolute error: 4 eps max abs(S) are allowed for the kernel, and the same for the
        oracle."""
        if found.name != "lse":
            return super().check_rows(found)
        eps = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
        assert (found.ours - found.right).abs().max() <= 8 * eps * (found.score + 4)


class Variant(TestPrefixStates):
    """Another chunk length, or another call; its accuracy is checked with one shape and normal inputs."""

    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    shapes = ({},)
    laws = ("normal",)
    bits = ()
    many = None
    compilers = ("eager", "aot_eager")

    def bad_arguments(self) -> list[str]:
        return []


class TestEveryKey(Variant):
    """A state after every key."""

    every = 1


class TestWholeTiles(Variant):
    """Chunks that end where tiles of keys do."""

    shapes = ({}, {"H": 2, "N": 1000, "E": 16})
    every = 64


class TestBiasAndDecay(Variant):
    """`prefix_attention_states` with a bias of each key, and a decay before each."""

    shapes = ({}, {"H": 2, "L": 33, "N": 197, "E": 16})
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "key_bias": "BHN", "rate": "BHN"}
    autocast = ()

    @staticmethod
    def decay(rate: Tensor, mask: Tensor | None) -> Tensor:
        """Numbers in [0.05, 1], whatever the suite puts into the rates. Masked keys fade the others, but with a number
        that does not depend on their rates."""
        decay = 0.05 + 0.95 * rate.double().nan_to_num().sigmoid()
        return decay if mask is None else decay.masked_fill(mask[:, None], 0.5)

    def call(self, impl: str, rate: Tensor, key_padding_mask: Tensor | None = None, **inputs: Any) -> Results:
        decay = self.decay(rate, key_padding_mask)
        return super().call(impl, decay=decay, key_padding_mask=key_padding_mask, **inputs)

    def oracle(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor,
        rate: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Results:
        states, logs = [], self.decay(rate, key_padding_mask).log()
        for stop in range(self.every, key.shape[2] + self.every, self.every):
            since = torch.nn.functional.pad(logs[..., 1:stop].flip(-1).cumsum(-1).flip(-1), (0, 1))
            bias = key_bias[..., :stop] + since[..., : key.shape[2]]
            part = (
                key[:, :, :stop],
                value[:, :, :stop],
                None if key_padding_mask is None else key_padding_mask[:, :stop],
            )
            states.append(ck.AttentionState(*oracles.attention(query, *part, key_bias=bias)))
        return _stacked(query, states, value.shape[-1])

    def in_torch(self, **inputs: Tensor) -> Results:
        out, lse = self.oracle(**inputs)
        return out.to(inputs["query"].dtype), lse.detach()

    def score(self, inputs: dict[str, Tensor]) -> float:
        bias = inputs["key_bias"]
        return super().score(inputs) + (float(bias.abs().max()) if bias.numel() else 0.0)

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)

    def check_result(self, name: str, ours: Tensor, right: Tensor, allowed: float) -> None:
        """Gradients of huge logits need only be finite, and what is added to scores is a part of a logit too."""
        if name.removeprefix("the gradient of ") not in ("key_bias", "rate"):
            super().check_result(name, ours, right, allowed)


class TestOneChunk(Variant):
    """A chunk longer than all keys gives one state, the state of all keys.

    The few keys of the checks below are one chunk in `TestWholeTiles`, too.
    """

    every = 1000
    test_gradcheck = test_gradgradcheck = test_only_the_gradients_that_are_asked_for = test_any_order = None
    test_forward_mode = test_derivatives_of_forward_mode = test_checkpointing = None
    test_opcheck = test_compile = test_vmap = test_empty_extents = None


class TestIncomingState(Variant):
    """`prefix_attention_states` with an incoming state of other keys;
    its gradient flows to them through `out` and `lse`."""

    dtypes = (torch.float64, torch.float32)
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "other_key": "BHMD", "other_value": "BHME"}
    logits = (("query",), ("key", "other_key"))
    extents = {**TestPrefixStates.extents, "M": 40}
    small = {**TestPrefixStates.small, "M": 4}
    empty = "BNM"
    mask = None
    autocast = ()
    every = 7

    def call(
        self, impl: str, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor
    ) -> Results:
        state = ck.attention_state(query, other_key, other_value, impl=impl)
        return tuple(ck.prefix_attention_states(query, key, value, every=self.every, state=state, impl=impl))

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> Results:
        stops = [min(stop + self.every, key.shape[2]) for stop in range(0, key.shape[2], self.every)]
        parts = (
            (torch.cat([other_key, key[:, :, :stop]], 2), torch.cat([other_value, value[:, :, :stop]], 2))
            for stop in stops
        )
        return _stacked(query, [ck.AttentionState(*oracles.attention(query, *part)) for part in parts], value.shape[-1])

    def in_torch(self, **inputs: Tensor) -> Results:
        out, lse = self.oracle(**inputs)
        return out.to(inputs["query"].dtype), lse.detach()

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], torch.cat([inputs["other_key"], inputs["key"]], 2))

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)


# ---- tests of this operator alone


def test_a_state_that_nothing_is_added_to_stays(impl: str) -> None:
    """If keys without weight are added, the lse of an incoming state changes by at most a float32 rounding of 1. A
    rounding of lse itself would be larger."""
    query, rows = torch.zeros(1, 2, 20, 4), torch.randn(1, 2, 9, 4)
    state = ck.AttentionState(torch.randn(1, 2, 20, 4), 1000 + torch.rand(1, 2, 20, dtype=torch.float64))
    found = ck.prefix_attention_states(query, rows, rows, every=4, state=state, impl=impl)
    assert (found.lse - state.lse.unsqueeze(2)).abs().max() < 1e-6
    assert (found.out - state.out.unsqueeze(2)).abs().max() < 1e-6


def test_flops() -> None:
    q, k, v = (torch.randn(2, 2, n, d, requires_grad=True) for n, d in ((3, 4), (5, 4), (5, 3)))
    with FlopCounterMode(display=False) as forward:
        states = ck.prefix_attention_states(q, k, v, every=2, impl="native")
    assert forward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (4 + 3) + (2 * 2 * 3 * 3) * 3
    with FlopCounterMode(display=False) as backward:
        states.out.sum().backward()
    assert backward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (3 * 4 + 2 * 3) + 2 * (2 * 2 * 3 * 3) * 2 * 3
    bias, decay = torch.randn(5, requires_grad=True), torch.full((5,), 0.5, requires_grad=True)
    faded = ck.prefix_attention_states(*(x.detach() for x in (q, k, v)), every=2, decay=decay, key_bias=bias)
    with FlopCounterMode(display=False) as of_scores:
        faded.out.sum().backward()
    assert of_scores.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (4 + 3) + 2 * (2 * 2 * 3 * 3) * 3 * 3


@pytest.mark.parametrize(
    "given, error", [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), ("4", TypeError)]
)
def test_every_that_is_no_number_of_keys(given: Any, error: type[Exception]) -> None:
    rows = torch.randn(1, 2, 9, 4)
    with pytest.raises(error, match=r"^every: got .*, expected an int >= 1"):
        ck.prefix_attention_states(rows, rows, rows, every=given)


@pytest.mark.parametrize("every", [9, 10, 2**63 - 1, 2**63])
@pytest.mark.parametrize("impl", ["native", "reference"])
def test_prefixes_longer_than_all_keys_are_one(every: int, impl: str) -> None:
    rows = torch.randn(1, 2, 9, 4)
    states = ck.prefix_attention_states(rows, rows, rows, every=every, impl=impl)
    assert (
        torch.equal(states.lse, ck.prefix_attention_states(rows, rows, rows, every=9, impl=impl).lse)
        and states.lse.shape[2] == 1
    )


def test_a_learned_scale_is_refused() -> None:
    rows = torch.randn(1, 2, 9, 4)
    with pytest.raises(TypeError, match=r"^scale: got a tensor that requires a gradient"):
        ck.prefix_attention_states(rows, rows, rows, scale=torch.tensor(0.5, requires_grad=True))


def test_the_parts_of_a_state_get_their_gradients_together() -> None:
    rows, lse = torch.randn(1, 2, 9, 4), torch.zeros(1, 2, 9, dtype=torch.float64)
    out = ck.prefix_attention_states(rows, rows, rows, every=9)
    needs = (False, False, False, True, False, False, False)
    given = (rows, rows, rows, None, rows, lse, *out, None, None, 9, 0.5, needs, "native")
    with pytest.raises(ValueError, match=r"^needs: got .*, expected equal values for state_out and state_lse"):
        torch.ops.cmab.prefix_attention_backward(*out, *given)
