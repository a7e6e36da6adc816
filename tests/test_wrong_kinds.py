"""Wrong kinds of arguments, for every tensor of every public function: the error names the argument and the expected
value."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import cmab_kernels as ck
from cmab_kernels.intention import variants
from cmab_kernels.nn import CMAB, MultiheadAttention

B, H, L, N, D = 2, 3, 5, 7, 4
Q, K, V = (torch.randn(B, H, n, D) for n in (L, N, N))
X, GRAM = torch.randn(B, N, 8), torch.eye(D).expand(B, H, D, D).contiguous()
MASK, WEIGHTS, LABELS = torch.zeros(B, N, dtype=torch.bool), torch.ones(B, N), (torch.arange(B * N) % 3).view(B, N)
STATE, SUMS = ck.attention_state(Q, K, V), ck.ridge_state(K, V)
MOMENTS = variants.class_moments(K, LABELS, 3)
STREAM, EXACT = ck.continual_nystrom_init(K, K, V, 3), ck.continual_attention_init(K, K, V)
TOKEN, GAMMA, ALPHA = K[:, :, :1], torch.tensor(1.0), torch.tensor(0.1)
TOKENS = {"query": TOKEN, "key": TOKEN, "value": TOKEN}
PADDED = {"key_padding_mask": MASK}
BIASED = {"key_bias": torch.zeros(B, H, N), **PADDED}
WEIGHTED = {"weights": WEIGHTS, **PADDED}
KEYS = {"query": Q, "key": K}
ROWS = {**KEYS, "value": V}
PACKED = {name: rows[:1] for name, rows in ROWS.items()}
NESTED = torch.nested.nested_tensor([torch.randn(2, D), torch.randn(3, D)], layout=torch.jagged)
OFFSETS = torch.tensor([0, N])
LAYER = {name: torch.randn(8, 8) for name in ("query_weight", "key_weight", "value_weight", "output_weight")}
BIASES = {name: torch.randn(8) for name in ("query_bias", "key_bias", "value_bias", "output_bias")}
LABELLED = {"key": K, "labels": LABELS, "num_classes": 3, **WEIGHTED}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "latent_attention": (ck.latent_attention, {**ROWS, **BIASED}),
    "latent_attention packed": (ck.latent_attention, {**PACKED, "cu_seqlens": OFFSETS}),
    "attention_state": (ck.attention_state, {**ROWS, "state": STATE, "decay": torch.tensor(0.5), **BIASED}),
    "remove_from_state": (ck.remove_from_state, {"state": STATE, **ROWS, **BIASED}),
    "prefix_attention_states": (
        ck.prefix_attention_states,
        {**ROWS, "state": STATE, "decay": torch.tensor(0.5), **BIASED},
    ),
    "merge_states": (ck.merge_states, {"first": STATE}),
    "merge_ridge": (ck.merge_ridge, {"first": SUMS}),
    "merge_moments": (variants.merge_moments, {"first": MOMENTS}),
    "projected_attention_state": (
        ck.projected_attention_state,
        {
            "query": Q,
            "inputs": X,
            "key_weight": torch.randn(H * D, 8),
            "value_weight": torch.randn(H * D, 8),
            "key_bias": torch.randn(H * D),
            "value_bias": torch.randn(H * D),
            "state": STATE,
            **PADDED,
        },
    ),
    "attention_layer": (ck.attention_layer, {"x": X, **LAYER, "num_heads": 2, "context": X + 1, **BIASES, **PADDED}),
    "feed_forward_layer": (
        ck.feed_forward_layer,
        {
            "x": X,
            "expand_weight": torch.randn(32, 8),
            "contract_weight": torch.randn(8, 16),
            "expand_bias": torch.randn(32),
            "contract_bias": torch.randn(8),
        },
    ),
    "intention": (ck.intention, {**ROWS, "alpha": ALPHA, **WEIGHTED}),
    "intention packed": (ck.intention, {**PACKED, "alpha": ALPHA, "cu_seqlens": OFFSETS}),
    "sigma_intention": (ck.sigma_intention, {**ROWS, "alpha": ALPHA, **WEIGHTED}),
    "nystrom_attention": (ck.nystrom_attention, {**ROWS, "query": K, "num_landmarks": 3, **PADDED}),
    "iterative_pinv": (ck.iterative_pinv, {"matrix": GRAM}),
    "ridge_state": (ck.ridge_state, {"key": K, "value": V, "state": SUMS, "decay": torch.tensor(0.5), **WEIGHTED}),
    "remove_ridge": (ck.remove_ridge, {"state": SUMS, "key": K, "value": V, **WEIGHTED}),
    "prefix_ridge_states": (ck.prefix_ridge_states, {"key": K, "value": V, "state": SUMS, **WEIGHTED}),
    "ridge_step": (
        ck.ridge_step,
        {"state": SUMS, "key": K, "value": V, "alpha": ALPHA, "decay": torch.tensor(0.5), **WEIGHTED},
    ),
    "solve_ridge": (ck.solve_ridge, {"state": SUMS, "alpha": ALPHA}),
    "regularised_solve": (ck.regularised_solve, {"gram": GRAM, "rhs": GRAM, "alpha": ALPHA}),
    "regularised_inverse": (ck.regularised_inverse, {"gram": GRAM, "alpha": ALPHA}),
    "continual_attention_init": (ck.continual_attention_init, {"query": K, "key": K, "value": V}),
    "continual_nystrom_init": (ck.continual_nystrom_init, {"query": K, "key": K, "value": V, "num_landmarks": 3}),
    "continual_attention_step": (ck.continual_attention_step, {"state": EXACT, **TOKENS}),
    "continual_nystrom_step": (ck.continual_nystrom_step, {"state": STREAM, **TOKENS}),
    "move_state": (ck.move_state, {"state": STREAM, "device": "cpu"}),
    "state_to_tensors": (ck.state_to_tensors, {"state": STREAM}),
    "state_from_tensors": (ck.state_from_tensors, {"kind": type(STREAM), "tensors": ck.state_to_tensors(STREAM)}),
    "class_moments": (variants.class_moments, {**LABELLED, "state": MOMENTS}),
    "constrained": (variants.constrained, {"key": K, "value": V, "alpha": ALPHA, **WEIGHTED}),
    "kernel_features": (variants.kernel_features, {**KEYS, "gamma": GAMMA, **PADDED}),
    "nystrom_features": (variants.nystrom_features, {**KEYS, "num_landmarks": 3, "gamma": GAMMA, **PADDED}),
    "lda": (variants.lda, {**LABELLED, "shrinkage": ALPHA}),
    "qda": (variants.qda, {**LABELLED, "regularisation": ALPHA}),
    "lssvm": (variants.lssvm, {**LABELLED, "alpha": ALPHA}),
    "pooled_class_scatter": (variants.pooled_class_scatter, {**LABELLED, "alpha": ALPHA}),
    "ridge": (variants.ridge, {"key": K, "value": V, "alpha": ALPHA, **WEIGHTED}),
    "solve_lda": (variants.solve_lda, {"moments": MOMENTS, "shrinkage": ALPHA}),
    "solve_qda": (variants.solve_qda, {"moments": variants.class_moments(K, LABELS, 3), "regularisation": ALPHA}),
    "solve_lssvm": (variants.solve_lssvm, {"moments": MOMENTS, "alpha": ALPHA}),
    "solve_pooled_class_scatter": (variants.solve_pooled_class_scatter, {"moments": MOMENTS, "alpha": ALPHA}),
}  # fmt: skip
OTHERS = {"empty_state", "empty_ridge", "explain", "use_impl"}
"""Functions that take no tensor, or any arguments."""
ALONE = {"iterative_pinv", "regularised_inverse"}
"""Functions of one tensor, with any dimensions before the last two."""
NUMBERS = {"alpha", "decay", "gamma", "shrinkage", "regularisation"}
"""Arguments that may be a number, including a NumPy number."""


def _changed(kind: str, given: Any) -> Any:
    """The values given in place of a tensor, or of the tensors of a state."""
    if isinstance(given, tuple):
        return {
            "None": None,
            "array": [np.asarray(part) for part in given],
            "list": list(given),
            "dict": {"out": 1},
            "a part that is an array": given._replace(**{given._fields[0]: np.asarray(given[0])}),
            "a part that is None": given._replace(**{given._fields[1]: None}),
            "half": given._replace(**{given._fields[0]: given[0].half()}),
            "a part that is sparse": given._replace(**{given._fields[1]: given[1].to_sparse()}),
            "a part that is nested": given._replace(**{given._fields[0]: NESTED}),
        }[kind]
    return {
        "None": None,
        "array": np.ones((2, 2)) if given.dim() == 0 else given.numpy(),
        "list": [[1.0, 2.0]] if given.dim() == 0 else given.tolist(),
        "text": "key",
        "whole": given.long() if given.dtype != torch.int64 else given.float(),
        "double": given.double()
        if given.is_floating_point()
        else given.int()
        if given.dtype == torch.bool
        else given.bool(),
        "complex": given.to(torch.complex64),
        "one dimension less": given[0] if given.dim() else torch.ones(9, 9),
        "one dimension more": given[None],
        "elsewhere": given.to("meta"),
        "sparse": given.to_sparse(),
        "nested": NESTED,
        "eight bits": given.float().to(torch.float8_e4m3fn),
    }[kind]


OF_STATES = (
    "None",
    "array",
    "list",
    "dict",
    "a part that is an array",
    "a part that is None",
    "half",
    "a part that is sparse",
    "a part that is nested",
)
OF_TENSORS = ("None", "array", "list", "text", "whole", "double", "complex", "one dimension less", "one dimension more",
              "elsewhere", "sparse", "nested", "eight bits")  # fmt: skip


def _cases(name: str) -> list[tuple[str, str]]:
    """Return each argument of a call that is a tensor or a state, with every kind of wrong value."""
    cases = []
    for argument, given in CALLS[name][1].items():
        of_state = isinstance(given, tuple) and hasattr(given, "_replace")
        kinds = OF_STATES if of_state else OF_TENSORS if isinstance(given, Tensor) else ()
        cases += [(argument, kind) for kind in kinds]
    return cases


def _may_be(name: str, argument: str, kind: str) -> bool:
    """Return whether the call accepts this value."""
    function, arguments = CALLS[name]
    if kind == "None":
        return inspect.signature(function).parameters[argument].default is None
    if argument in NUMBERS or argument == "weights":
        return kind == "double" or (kind == "one dimension more" and argument != "weights")  # has its own dtype
    if argument == "key_bias" and "key" in arguments:
        return kind in ("double", "one dimension less")  # has its own dtype, and is broadcast
    if kind == "double":
        return name in ALONE or (argument == "key" and "labels" in arguments)
    if argument == "query" and kind == "one dimension less":
        return not name.startswith("continual") and not name.endswith("features")  # shared over the batch
    if name in ALONE:
        return kind in ("one dimension less", "one dimension more", "elsewhere")
    return (name, argument) == ("feed_forward_layer", "x") and "dimension" in kind


def _problem(name: str, argument: str, kind: str) -> str:
    """Return what is wrong with the error of the call with this kind of value; "" if nothing is."""
    function, arguments = CALLS[name]
    try:
        function(**{**arguments, argument: _changed(kind, arguments[argument])})
    except Exception as error:
        message, named = str(error), "states" if argument == "first" else argument
        right = re.match(r"[\w.\[\]]+: got .*, expected ", message) and re.search(rf"\b{named}\b", message)
        refused = isinstance(error, TypeError | ValueError) and right and not _may_be(name, argument, kind)
        return "" if refused else f"{type(error).__name__}: {message}"
    return "" if _may_be(name, argument, kind) else "it was accepted"


@pytest.mark.parametrize("name", [name for name in CALLS if _cases(name)])
def test_a_wrong_kind_is_named(name: str) -> None:
    problems = {case: _problem(name, *case) for case in _cases(name)}
    assert {case: problem for case, problem in problems.items() if problem} == {}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_distributed_tensor_is_named(name: str, mesh: DeviceMesh) -> None:
    function, arguments = CALLS[name]

    def spread(given: Tensor) -> Tensor:
        return DTensor.from_local(given, mesh, [Replicate()])

    for argument, given in arguments.items():
        if isinstance(given, Tensor):
            wrong = spread(given)
        elif isinstance(given, tuple) and hasattr(given, "_replace"):
            wrong = given._replace(**{given._fields[0]: spread(given[0])})
        else:
            continue
        named = r"states\[0\]" if argument == "first" else argument
        with pytest.raises(
            TypeError, match=rf"^{named}[\w.]*: got a DTensor, expected a tensor of this rank; .*to_local"
        ):
            function(**{**arguments, argument: wrong})


def test_modules_and_estimators_name_a_distributed_tensor(mesh: DeviceMesh) -> None:
    rows = DTensor.from_local(X, mesh, [Replicate()])
    calls: dict[str, Callable[[], object]] = {
        "query": lambda: MultiheadAttention(8, 2)(rows, rows, rows, need_weights=False),
        "inputs": lambda: CMAB(8, 2, 2)(rows, X[0]),
        "X": lambda: ck.OnlineRidge().fit(rows[0], X[0]),
    }
    for argument, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{argument}: got a DTensor, expected a tensor of this rank; .*to_local"):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_an_option_that_is_no_text_is_named(name: str) -> None:
    function, arguments = CALLS[name]
    options = [
        option
        for option, parameter in inspect.signature(function).parameters.items()
        if isinstance(parameter.default, str) and option != "name"
    ]
    for option, wrong in itertools.product(options, ([], {}, None, 1, torch.ones(2), np.ones(2), "no such thing")):
        with pytest.raises((TypeError, ValueError), match=rf"^{option}: got "):
            function(**{**arguments, option: wrong})


ARRAYS = {
    "array": np.ones(2),
    "names": np.array(["auto", "dual"]),
    "tensor": torch.ones(2),
    "bools": torch.tensor([True, False]),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("name", CALLS)
def test_an_option_that_is_an_array_is_named(name: str, kind: str) -> None:
    """Python cannot tell whether an array is true or equal to a name, and its own error names no argument."""
    function, arguments = CALLS[name]
    for option, parameter in inspect.signature(function).parameters.items():
        given = arguments.get(option, parameter.default)
        variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        if variadic or isinstance(given, (Tensor, tuple)) or "Tensor" in str(parameter.annotation) or option == "name":
            continue
        with pytest.raises((TypeError, ValueError), match=rf"^{option}: got "):
            function(**{**arguments, option: ARRAYS[kind]})


@pytest.mark.parametrize("device", [True, 2**63, 1.0, "no such device"])
def test_what_is_no_device_is_named(device: Any) -> None:
    calls: list[Callable[..., Any]] = [
        lambda device: ck.move_state(STREAM, device),
        lambda device: ck.empty_state(1, 2, 3, 4, device=device),
        lambda device: ck.empty_ridge(1, 2, 3, 4, device=device),
    ]
    for call in calls:
        with pytest.raises(
            (TypeError, ValueError), match=r"^device: got .*, expected a torch\.device or the name of one$"
        ):
            call(device)


@pytest.mark.parametrize("every", [2**63, 10**30])
def test_a_size_that_torch_cannot_count_is_more_than_all(every: int) -> None:
    for call in (
        lambda every: ck.prefix_attention_states(**ROWS, every=every),
        lambda every: ck.prefix_ridge_states(K, V, every=every),
    ):
        assert all(map(torch.equal, call(every), call(K.shape[2])))


def test_every_public_function_is_here() -> None:
    public = {name for name in ck.__all__ if inspect.isfunction(getattr(ck, name))} | {
        name for name in variants.__all__ if inspect.isfunction(getattr(variants, name))
    }
    assert public - OTHERS == {name.split()[0] for name in CALLS}


def _swapped(*names: str) -> dict[str, Tensor]:
    return {name: given.transpose(1, 2) if name in names else given for name, given in ROWS.items()}


@pytest.mark.parametrize(
    ("swapped", "said"),
    [
        (
            ("key", "value"),
            "^key: got shape .* query has shape .*; key seems to have the heads in the third dimension, so pass "
            ".transpose",
        ),
        (
            ("query",),
            "^query: got shape .* key has shape .*; query seems to have the heads in the third dimension, so pass "
            ".transpose",
        ),
        (
            ("query", "key", "value"),
            "^key: got shape .*; key and query seem to have the heads in the third dimension, so pass .transpose",
        ),
        (
            ("value",),
            r"^value: got shape .* as key has shape .*; key or value seems to be \(B, N, H, D\), so pass its "
            r".transpose\(1, 2\)",
        ),
        (
            ("key",),
            r"^value: got shape .* as key has shape .*; key or value seems to be \(B, N, H, D\), so pass its "
            r".transpose\(1, 2\)",
        ),
    ],
)
@pytest.mark.parametrize(
    "name", ["latent_attention", "prefix_attention_states", "intention", "sigma_intention", "nystrom_attention"]
)
def test_a_swapped_layout_is_said(name: str, swapped: tuple[str, ...], said: str) -> None:
    options = {"alpha": 0.1} if "intention" in name else {"num_landmarks": 1} if "nystrom" in name else {}
    with pytest.raises(ValueError, match=said):
        getattr(ck, name)(**_swapped(*swapped), **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ck.merge_states([STATE, STATE]),
            r"^states\[0\]: got a list, expected an AttentionState.* unpacks a list",
        ),
        (
            lambda: ck.merge_ridge([SUMS, SUMS]),
            r"^states\[0\]: got a list, expected a RidgeState.* unpacks a list",
        ),
        (
            lambda: variants.merge_moments((MOMENTS, MOMENTS)),
            r"^states\[0\]: got a tuple, expected a ClassMoments.* unpacks a list",
        ),
        (lambda: ck.merge_states(tuple(STATE), STATE), r"AttentionState\(\*states\[0\]\) makes one"),
        (
            lambda: ck.attention_state(Q, K, V, state=STATE._asdict()),
            r"^state: got a dict, expected .*AttentionState\(\*\*state\) makes one",
        ),
        (
            lambda: ck.latent_attention(Q, K.numpy(), V),
            r"^key: got a ndarray, expected a torch.Tensor; torch.as_tensor\(key\) makes one",
        ),
        (
            lambda: ck.latent_attention(Q, K, V.tolist()),
            r"^value: got a list, expected a torch.Tensor; torch.as_tensor\(value\)",
        ),
    ],
)
def test_the_likely_cause_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()
