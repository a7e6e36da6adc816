"""Bad input of the layers raises an error that names the argument, the given value and the allowed values.

The suite has wrong dtypes, devices and shared lengths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cmab_kernels as ck

X, CONTEXT, MATRIX = torch.randn(2, 3, 4), torch.randn(2, 7, 6), torch.randn(4, 4)
NORM = (torch.ones(4), torch.zeros(4), 1e-5)
FEED_FORWARD = {"x": X, "expand_weight": torch.randn(10, 4), "contract_weight": torch.randn(4, 5)}
ATTENTION = {
    "x": X,
    "context": CONTEXT,
    "query_weight": MATRIX,
    "key_weight": torch.randn(4, 6),
    "value_weight": torch.randn(8, 6),
    "output_weight": torch.randn(4, 8),
    "num_heads": 2,
}
SELF = {"context": None, "key_weight": MATRIX, "value_weight": torch.randn(8, 4)}

BAD_FEED_FORWARD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "x without columns": (ValueError, r"^x: got shape \(2, 0\).*C >= 1", {"x": torch.randn(2, 0)}),
    "x of no dimension": (ValueError, r"^x: got shape \(\)", {"x": torch.tensor(1.0)}),
    "odd rows of a gate": (
        ValueError,
        r"^expand_weight: got shape \(9, 4\).*\(2 F, C\)",
        {"expand_weight": torch.randn(9, 4)},
    ),
    "no hidden features": (ValueError, r"^expand_weight: got shape \(0, 4\)", {"expand_weight": torch.randn(0, 4)}),
    "a vector": (ValueError, r"^expand_weight: got shape \(4,\)", {"expand_weight": torch.randn(4)}),
    "contract for no gate": (ValueError, r"^contract_weight: got shape \(4, 5\).*\(4, 10\)", {"activation": "relu"}),
    "bias of half the rows": (ValueError, r"^expand_bias: got shape \(5,\).*\(10,\)", {"expand_bias": torch.randn(5)}),
    "a list of activations": (ValueError, r"^activation: got \['relu'\].*geglu, gelu, relu", {"activation": ["relu"]}),
    "an unknown activation": (ValueError, r"^activation: got 'tanh'.*geglu, gelu, relu", {"activation": "tanh"}),
    "an unknown residual": (ValueError, r"^residual: got 'post'.*input, normed", {"residual": "post"}),
    "a module as norm": (TypeError, r"^norm: got a LayerNorm.*\(weight, bias, eps\)", {"norm": torch.nn.LayerNorm(4)}),
    "a norm of two parts": (TypeError, r"^norm: got a tuple", {"norm": NORM[:2]}),
    "a norm without weight": (TypeError, r"^norm\[0\]: got None", {"norm": (None, None, 1e-5)}),
    "a norm of another width": (ValueError, r"^norm\[0\]: got shape \(3,\)", {"norm": (torch.ones(3), None, 1e-5)}),
    "a norm of negative eps": (ValueError, r"^norm\[2\]: got -1.0", {"norm": (*NORM[:2], -1.0)}),
    "a huge eps": (ValueError, r"^norm\[2\]: got an int beyond the range of floats", {"norm": (*NORM[:2], 10**400)}),
    "an eps that is NaN": (ValueError, r"^norm\[2\]: got nan", {"norm": (*NORM[:2], float("nan"))}),
    "no weight": (TypeError, r"^contract_weight: got None", {"contract_weight": None}),
    "unknown impl": (ValueError, r"^impl: got 'cuda'.*reference", {"impl": "cuda"}),
}

BAD_ATTENTION: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "x of two dimensions": (ValueError, r"^x: got shape \(3, 4\).*\(B, L, C\)", {"x": X[0]}),
    "context of another batch": (ValueError, r"^context: got shape \(1, 7, 6\).*B = 2", {"context": CONTEXT[:1]}),
    "context of two dimensions": (ValueError, r"^context: got shape \(7, 6\)", {"context": CONTEXT[0]}),
    "no heads": (ValueError, r"^num_heads: got 0", {"num_heads": 0}),
    "heads of truth": (ValueError, r"^num_heads: got True", {"num_heads": True}),
    "half a head": (ValueError, r"^num_heads: got 0.5", {"num_heads": 0.5}),
    "a residual of truth": (ValueError, r"^residual: got True.*input, normed", {"residual": True}),
    "heads that do not divide": (ValueError, r"^query_weight: got shape \(4, 4\).*num_heads = 3", {"num_heads": 3}),
    "heads without width": (ValueError, r"^query_weight: got shape \(0, 4\)", {"query_weight": MATRIX[:0]}),
    "keys of another width": (
        ValueError,
        r"^key_weight: got shape \(6, 6\).*\(4, 6\)",
        {"key_weight": torch.randn(6, 6)},
    ),
    "keys of x's width": (ValueError, r"^key_weight: got shape \(4, 4\).*\(4, 6\)", {"key_weight": MATRIX}),
    "output of other heads": (ValueError, r"^output_weight: got shape \(4, 4\).*\(4, 8\)", {"output_weight": MATRIX}),
    "output bias too long": (ValueError, r"^output_bias: got shape \(5,\).*\(4,\)", {"output_bias": torch.randn(5)}),
    "a context's norm of x's width": (
        ValueError,
        r"^context_norm\[0\]: got shape \(4,\).*\(6,\)",
        {"context_norm": NORM},
    ),
    "a mask of x": (
        ValueError,
        r"^key_padding_mask: got shape \(2, 3\).*\(2, 7\)",
        {"key_padding_mask": torch.zeros(2, 3).bool()},
    ),
    "a norm of ignored rows without eps": (
        ValueError,
        r"^context_norm\[2\]: got 0.*> 0.*key_padding_mask",
        {"context_norm": (torch.ones(6), None, 0.0), "key_padding_mask": torch.zeros(2, 7).bool()},
    ),
    "a norm of its own ignored rows without eps": (
        ValueError,
        r"^norm\[2\]: got 0",
        {**SELF, "norm": (*NORM[:2], 0), "key_padding_mask": torch.zeros(2, 3).bool()},
    ),
    "an additive mask": (TypeError, r"^key_padding_mask: got torch.float32", {"key_padding_mask": torch.zeros(2, 7)}),
}


@pytest.mark.parametrize("case", BAD_FEED_FORWARD)
def test_bad_arguments_of_a_feed_forward_layer(case: str) -> None:
    error, message, changed = BAD_FEED_FORWARD[case]
    with pytest.raises(error, match=message):
        ck.feed_forward_layer(**{**FEED_FORWARD, **changed})


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_bad_arguments_of_an_attention_layer(case: str) -> None:
    error, message, changed = BAD_ATTENTION[case]
    with pytest.raises(error, match=message):
        ck.attention_layer(**{**ATTENTION, **changed})


def test_a_norm_may_have_an_eps_of_zero_where_no_row_is_ignored(impl: str) -> None:
    norm = torch.ones(4), torch.zeros(4), 0.0
    ignored = torch.tensor([[False, True, False, False, True, False, False]]).expand(2, -1)
    for changed in ({**SELF, "norm": norm}, {"norm": norm, "key_padding_mask": ignored}):
        assert ck.attention_layer(**{**ATTENTION, **changed, "impl": impl}).isfinite().all()


def test_the_norm_of_a_context_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"^context_norm: got a norm without a context"):
        ck.attention_layer(X, MATRIX, MATRIX, MATRIX, MATRIX, num_heads=2, context_norm=NORM)
