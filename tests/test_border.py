"""The extension checks its arguments itself:
a wrong call raises an exception that names an argument, and never crashes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.layers import BlockStack
from cmab_kernels.layers.stack.contract import kept_bytes

native = pytest.importorskip("cmab_kernels._C", reason="the extension was not built")

B, H, L, N, D, E, M, m = 2, 3, 4, 5, 6, 7, 2, 3


def _rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def _wide(*shape: int) -> Tensor:
    return _rows(*shape, dtype=torch.float64)


def _attention() -> dict[str, Any]:
    tensors = {"query": _rows(B, H, L, D), "cu_seqlens": None, "key": _rows(B, H, N, D), "value": _rows(B, H, N, E)}
    mask = torch.zeros(B, N, dtype=torch.bool)
    return {**tensors, "key_padding_mask": mask, "key_bias": _rows(B, H, N), "scale": 0.4}


def _packed() -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 5])
    return {
        **_attention(),
        "cu_seqlens": offsets,
        "key": _rows(1, H, N, D),
        "value": _rows(1, H, N, E),
        "key_padding_mask": None,
        "key_bias": _rows(1, H, N),
    }


def _state() -> dict[str, Any]:
    state = {
        "state_out": _rows(B, H, L, E),
        "state_lse": _wide(B, H, L),
        "out": _rows(B, H, L, E),
        "lse": _wide(B, H, L),
    }
    return {**state, "reliable": None}


def _merged() -> dict[str, Any]:
    parts = {name: _rows(B, H, L, E) for name in ("first_out", "second_out", "out")}
    return {**parts, **{name: _wide(B, H, L) for name in ("first_lse", "second_lse", "lse")}}


def _feed_forward() -> dict[str, Any]:
    norm = {"norm_weight": _rows(D), "norm_bias": _rows(D), "eps": 1e-5}
    expand = {"expand_weight": _rows(2 * E, D), "expand_bias": _rows(2 * E)}
    return {
        "x": _rows(N, D),
        **norm,
        **expand,
        "contract_weight": _rows(D, E),
        "contract_bias": _rows(D),
        "activation": 0,
        "residual": 0,
    }


def _layer() -> dict[str, Any]:
    """A layer of B latents and B * 2 rows of context, 9 wide, with H heads of D and E."""
    norms = {
        "norm_weight": _rows(D),
        "norm_bias": _rows(D),
        "context_norm_weight": _rows(9),
        "context_norm_bias": _rows(9),
    }
    widths = {"query": (H * D, D), "key": (H * D, 9), "value": (H * E, 9), "output": (D, H * E)}
    weights = {
        f"{name}_{part}": _rows(*shape[:n])
        for name, shape in widths.items()
        for part, n in (("weight", 2), ("bias", 1))
    }
    numbers = {"eps": 1e-5, "context_eps": 1e-5, "scale": 0.4, "batch": B, "num_heads": H, "residual": 0}
    mask = torch.zeros(B * 2, dtype=torch.bool)
    return {"x": _rows(B * L, D), "context": _rows(B * 2, 9), "key_padding_mask": mask, **norms, **weights, **numbers}


def _projected() -> dict[str, Any]:
    """Two blocks of queries over the same inputs, of D columns."""
    tensors = {
        "query": _rows(2 * B, H, L, D),
        "cu_seqlens": None,
        "inputs": _rows(B, N, D),
        "weight": _rows(2, H * (D + E), D),
    }
    mask = torch.zeros(B, N, dtype=torch.bool)
    return {
        **tensors,
        "bias": _rows(2, H * (D + E)),
        "key_padding_mask": mask,
        "scale": 0.4,
        "normed": True,
        "eps": 1e-5,
    }


def _projected_state() -> dict[str, Any]:
    return {"out": _rows(2 * B, H, L, E), "lse": _wide(2 * B, H, L)}


def _projected_slopes() -> dict[str, Any]:
    needed = {name: t for name, t in _projected().items() if name in ("query", "inputs", "weight", "bias")}
    return _projected_state() | {f"d{name}": t for name, t in {**_projected_state(), **needed}.items()}


def _kept() -> dict[str, Any]:
    rows = {"query": _rows(B * L, H * D), "key": _rows(B * 2, H * D), "value": _rows(B * 2, H * E)}
    return {**rows, "out": _rows(B, H, L, E), "lse": _wide(B, H, L)}


def _stack() -> dict[str, Any]:
    """Two blocks of B sets of L latents and m block latents, 6 wide, with 2 heads, over N inputs."""
    bias, square, forward = (6,), (6, 6), [(6,), (6,), (14, 6), (14,), (6, 7), (6,)]
    attend, across = ([*[bias] * norms, *[square] * 4, bias] for norms in (2, 4))
    shapes = [(m, 6), *across, *forward, *attend, *forward, *across, *forward, *attend, *forward] * 2
    tensors = {"x": _rows(B, L, 6), "inputs": _rows(B, N, 6), "key_padding_mask": torch.zeros(B, N, dtype=torch.bool)}
    return {
        **tensors,
        "between": _rows(1, B, L, 6),
        "num_heads": 2,
        "scale": 0.4,
        "eps": 1e-5,
        "residual": 1,
        "parameters": tuple(_rows(*shape) for shape in shapes),
    }


def _stack_state() -> dict[str, Any]:
    return {"out": _rows(2 * B, 2, m, 3), "lse": _wide(2 * B, 2, m)}


def _stack_kept() -> Tensor:
    given = _stack()
    stack = BlockStack(given["x"], None, None, None, None, given["parameters"], 2, 1e-5, "input")
    return torch.zeros(kept_bytes(stack, 2) // 8, dtype=torch.float64)


def _stack_forward() -> dict[str, Any]:
    before = {f"state_{name}": t for name, t in _stack_state().items()}
    return {**_stack(), **before, **_stack_state(), "y": _rows(B, L, 6), "kept": _stack_kept()}


def _stack_read() -> dict[str, Any]:
    given = {
        name: argument
        for name, argument in _stack_forward().items()
        if name not in {"x", "residual", "between", "y", "kept"}
    }
    return given | {"parameters": tuple(t for k in range(2) for t in given["parameters"][57 * k : 57 * k + 8])}


def _stack_slopes() -> dict[str, Any]:
    given = _stack()
    made = {
        "dy": _rows(B, L, 6),
        "dbetween": _rows(1, B, L, 6),
        "dx": _rows(B, L, 6),
        "dinputs": _rows(B, N, 6),
        "dattended": _rows(2 * B, 2, m, 3),
    }
    gradients = tuple(map(torch.empty_like, given["parameters"]))
    return {**given, **_stack_state(), **made, "kept": _stack_kept(), "gradients": gradients}


def _gradients(given: dict[str, Any]) -> dict[str, Any]:
    return {
        f"d{name}": torch.empty_like(t) for name, t in given.items() if isinstance(t, Tensor) and t.dtype != torch.bool
    }


def _slopes() -> dict[str, Any]:
    given = {"dout": _rows(B, H, L, E), "dlse": _wide(B, H, L), "out": _rows(B, H, L, E), "lse": _wide(B, H, L)}
    of_keys = {"dkey": _rows(B, H, N, D), "dvalue": _rows(B, H, N, E), "dkey_bias": _rows(B, H, N)}
    return {**given, "dquery": _rows(B, H, L, D), **of_keys}


def _rows_of_sums() -> dict[str, Any]:
    weights, mask = torch.rand(B, H, N), torch.zeros(B, N, dtype=torch.bool)
    rows = {"key": _rows(B, H, N, D), "value": _rows(B, H, N, E), "weights": weights, "key_padding_mask": mask}
    return {"cu_seqlens": None, **rows}


def _packed_rows_of_sums() -> dict[str, Any]:
    rows = {name: t[:1] for name, t in _rows_of_sums().items() if name != "cu_seqlens"}
    return {"cu_seqlens": torch.tensor([0, 2, 5]), **rows}


def _sums() -> dict[str, Any]:
    return {**_rows_of_sums(), "exact": True}


def _new_sums() -> dict[str, Any]:
    new = {"gram": _wide(B, H, D, D), "moment": _wide(B, H, D, E), "count": torch.zeros(B, H, dtype=torch.int64)}
    return {f"{name}_before": torch.zeros_like(t) for name, t in new.items()} | new


def _solution() -> dict[str, Any]:
    return {"alpha": _wide(B, H).abs(), "weight": _wide(B, H, D, E), "info": torch.zeros(B, H, dtype=torch.int32)}


def _of_sums() -> dict[str, Any]:
    gradients = {"dkey": _rows(B, H, N, D), "dvalue": _rows(B, H, N, E), "dweights": _rows(B, H, N)}
    return {"dgram": _wide(B, H, D, D), "dmoment": _wide(B, H, D, E), **gradients}


def _landmarks() -> dict[str, Any]:
    tensors = {"landmark_query": _rows(M, m, D), "landmark_key": _rows(M, m, D), "values": _rows(M, m, E)}
    return {**tensors, "absent": torch.zeros(M, m, dtype=torch.bool), "scale": 0.4, "iterations": 2}


CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "attention": ("attention_forward", lambda: _attention() | _state()),
    "attention of packed sets": ("attention_forward", lambda: _packed() | _state()),
    "gradient of attention": ("attention_backward", lambda: _attention() | _slopes()),
    "attention over projected inputs": (
        "projected_attention_forward",
        lambda: _projected() | _projected_state() | {f"state_{name}": t for name, t in _projected_state().items()},
    ),
    "gradient of attention over projected inputs": (
        "projected_attention_backward",
        lambda: _projected() | _projected_slopes(),
    ),
    "removal": (
        "attention_forward",
        lambda: _attention() | _state() | {"reliable": torch.zeros(B, H, L, dtype=torch.bool)},
    ),
    "merge": ("merge_states", _merged),
    "feed-forward": ("feed_forward_layer", lambda: _feed_forward() | {"y": _rows(N, D)}),
    "gradient of feed-forward": (
        "feed_forward_layer_backward",
        lambda: _feed_forward() | {"dy": _rows(N, D)} | _gradients(_feed_forward()),
    ),
    "attention layer": ("attention_layer", lambda: _layer() | _kept() | {"y": _rows(B * L, D)}),
    "gradient of the attention layer": (
        "attention_layer_backward",
        lambda: _layer() | _kept() | {"dy": _rows(B * L, D)} | _gradients(_layer()),
    ),
    "stacked blocks": ("block_stack", _stack_forward),
    "what stacked blocks read": ("block_stack_read", _stack_read),
    "gradient of stacked blocks": ("block_stack_backward", _stack_slopes),
    "sums": ("gram", lambda: _sums() | {"gram": _wide(B, H, D, D), "moment": _wide(B, H, D, E)}),
    "sums of packed sets": (
        "gram",
        lambda: _packed_rows_of_sums() | {"exact": True, "gram": _wide(B, H, D, D), "moment": _wide(B, H, D, E)},
    ),
    "update of the sums of packed sets": ("ridge_update", lambda: _packed_rows_of_sums() | _new_sums()),
    "update of sums": ("ridge_update", lambda: _rows_of_sums() | _new_sums()),
    "update of sums, and solution": ("ridge_step", lambda: _rows_of_sums() | _new_sums() | _solution()),
    "gradient of the sums of packed sets": (
        "gram_backward",
        lambda: {
            **_packed_rows_of_sums(),
            "exact": True,
            **{name: t if name in ("dgram", "dmoment") else t[:1] for name, t in _of_sums().items()},
        },
    ),
    "gradient of sums": ("gram_backward", lambda: _sums() | _of_sums()),
    "rows": ("apply_rows", lambda: {"query": _rows(B, H, L, D), "weight": _wide(B, H, D, E), "out": _rows(B, H, L, E)}),
    "solve": (
        "regularised_solve",
        lambda: {
            "gram": torch.eye(D).repeat(M, 1, 1),
            "rhs": _rows(M, D, E),
            "alpha": torch.rand(M),
            "weight": _rows(M, D, E),
            "info": torch.zeros(M, dtype=torch.int32),
        },
    ),
    "pseudo-inverse": (
        "iterative_pinv",
        lambda: {"matrix": torch.rand(M, m, m), "iterations": 2, "inverse": _rows(M, m, m)},
    ),
    "gradient of the pseudo-inverse": (
        "iterative_pinv_backward",
        lambda: {"matrix": torch.rand(M, m, m), "iterations": 2, "dinverse": _rows(M, m, m), "dmatrix": _rows(M, m, m)},
    ),
    "landmarks": ("landmark_values", lambda: _landmarks() | {"out": _rows(M, m, E)}),
    "gradient of landmarks": (
        "landmark_values_backward",
        lambda: (
            _landmarks()
            | {"dout": _rows(M, m, E), "dquery": _rows(M, m, D), "dkey": _rows(M, m, D), "dvalues": _rows(M, m, E)}
        ),
    ),
}
BLOCKS = ("stacked blocks", "gradient of stacked blocks")
OPTIONAL = {
    *("cu_seqlens", "key_padding_mask", "state_out", "state_lse", "weights", "absent"),
    *("gram", "moment", "dquery", "dkey", "dvalue", "dkey_bias", "dweights", "dinputs", "dweight", "dbias"),
    *("gram_before", "moment_before", "count_before"),
    *("reliable", "kept", "context", *(f"{n}norm_{p}" for n in ("", "context_") for p in ("weight", "bias"))),
    *(f"{name}_bias" for name in ("expand", "contract", "query", "key", "value", "output")),
    *_gradients(_layer() | _feed_forward()),
}
"""Arguments that may be None: an absent input, or an unwanted result."""


def _wrong(tensor: Tensor) -> dict[str, Any]:
    """Return values that are wrong for any argument that expects this tensor."""
    more = [tensor.new_zeros([n + (i == d) for i, n in enumerate(tensor.shape)]) for d in range(tensor.dim())]
    return {
        "no tensor": [1.0],
        "another type": tensor.to(torch.complex64 if tensor.dtype != torch.bool else torch.float64),
        "a type of elsewhere": tensor.to(
            torch.int64 if tensor.is_floating_point() or tensor.dtype == torch.int32 else torch.float16
        ),
        "a dimension too few": tensor[0],
        "a dimension too many": tensor[None],
        "on another device": tensor.to("meta"),
        "sparse": tensor.to_sparse(),
        **{f"one more in dimension {d}": one for d, one in enumerate(more)},
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_tensor_is_refused(call: str) -> None:
    name, arguments = CALLS[call]
    function = getattr(native, name)
    for argument, given in arguments().items():
        if not isinstance(given, Tensor):
            continue
        for what, wrong in _wrong(given).items():
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: `\w+` "):
                function(**arguments() | {argument: wrong})
                pytest.fail(f"`{argument}`, {what}, was taken")


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_list_of_arguments_is_refused(call: str) -> None:
    """A missing argument, an unknown argument, None where a tensor is needed, and arguments by position raise an
    error."""
    name, arguments = CALLS[call]
    function, right = getattr(native, name), arguments()
    function(**right)
    needed = {"kept"} if call.startswith("gradient") else set()
    of_blocks = {"inputs", "lse", "dattended", "between", "dbetween"}  # blocks that do not read have none
    optional = OPTIONAL | (of_blocks if call in BLOCKS else set())
    for argument in right:
        with pytest.raises(TypeError, match=f"{name}: `{argument}` is missing"):
            function(**{other: given for other, given in right.items() if other != argument})
        if (argument not in optional or argument in needed) and isinstance(right[argument], Tensor):
            with pytest.raises(TypeError, match=f"{name}: `{argument}` is a NoneType"):
                function(**right | {argument: None})
    with pytest.raises(TypeError, match="an argument that it does not have"):
        function(**right, more=1)
    with pytest.raises(TypeError, match="by keyword"):
        function(*right.values())


@pytest.mark.parametrize("call", CALLS)
def test_what_is_filled_is_contiguous(call: str) -> None:
    name, arguments = CALLS[call]
    filled = {"out", "lse", "gram", "moment", "count", "weight", "info", "inverse", "dmatrix"}
    filled |= {"dquery", "dkey", "dvalue", "dvalues", "dweights"}
    inputs = {"solve": {"gram"}, "rows": {"weight"}}.get(call, set())
    for argument in (filled & set(arguments())) - inputs:
        apart = arguments()[argument].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(ValueError, match=re.escape(f"{name}: `{argument}` is not contiguous")):
            getattr(native, name)(**arguments() | {argument: apart})


def test_what_has_no_memory_is_refused() -> None:
    """A tensor of zeros without memory, which torch may pass to a backward pass, has a shape and no address."""
    arguments = _attention() | _state() | {"key": torch._efficientzerotensor(B, H, N, D)}
    with pytest.raises(ValueError, match="`key` is not a dense tensor"):
        native.attention_forward(**arguments)


def test_widths_beyond_the_kernels_are_refused() -> None:
    arguments = _attention() | _state()
    wide = native.MAX_WIDTH + 1
    arguments |= {"query": _rows(B, H, L, wide), "key": _rows(B, H, N, wide)}
    with pytest.raises(ValueError, match="`key` has a width"):
        native.attention_forward(**arguments)


def test_wrong_descriptions_of_modules_are_refused() -> None:
    leaf = ("weights", torch.nn.Linear, True)
    modules = {"layer": torch.nn.ModuleDict({"weights": torch.nn.Linear(2, 3)})}
    right = {
        "modules": modules,
        "layers": (("layer", torch.nn.ModuleDict, (leaf,)),),
        "settings": {"num_heads": 1},
        "tensors": [],
        "eps": set(),
    }
    assert native.collect_parameters(**right)
    assert list(map(id, right["tensors"])) == list(map(id, modules["layer"].parameters()))
    wrong = {"modules": [None, []], "settings": [None, 1], "tensors": [(), None], "eps": [{}, None]}
    wrong["layers"] = [
        None,
        (None,),
        (leaf[:2],),
        (("layer", torch.nn.ModuleDict, None),),
        (("layer", torch.nn.ModuleDict, (1,)),),
    ]
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^collect_parameters: `{name}` "):
                native.collect_parameters(**right | {name: value})
    for name in right:
        with pytest.raises(TypeError, match=f"`{name}` is missing"):
            native.collect_parameters(**{other: value for other, value in right.items() if other != name})


def test_parameters_and_views_cross_as_they_are() -> None:
    """A parameter, and a tensor that requires a gradient and has unusual strides, are read like other tensors."""
    arguments = _attention() | _state()
    native.attention_forward(**arguments)
    wanted = arguments["out"].clone()
    arguments["query"] = torch.nn.Parameter(arguments["query"])
    arguments["key"] = arguments["key"].mT.contiguous().mT.requires_grad_()
    native.attention_forward(**arguments)
    assert torch.equal(arguments["out"], wanted)
