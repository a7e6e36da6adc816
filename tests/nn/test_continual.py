"""Continual attention as a module equals continual-inference where the latter is stable, and `forward` of its window at
every step."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from typing import Any

import continual as peer
import pytest
import torch
from torch import Tensor, nn

from cmab_kernels import state_to_tensors
from cmab_kernels.nn import ContinualAttention, ContinualNystromAttention, FillingWindow, replace_modules
from cmab_kernels.nn import MultiheadAttention as Ours
from cmab_kernels.nn.continual.base import Continual

DIM, HEADS, BATCH, WINDOW = 24, 3, 2, 11
OUTPUTS = ["single", "retroactive"]
PEERS = {"single": peer.SingleOutputMultiheadAttention, "retroactive": peer.RetroactiveMultiheadAttention}

KINDS: dict[str, Any] = {
    "exact": ContinualAttention,
    "continual": partial(ContinualNystromAttention, num_landmarks=3, pinv_iterations=8),
    "fixed": partial(ContinualNystromAttention, num_landmarks=3, landmarks="fixed"),
}


def made(kind: str, **config: Any) -> Continual:
    """Return a module in eval mode in which no weight is 0."""
    module = KINDS[kind](DIM, HEADS, **{"dtype": torch.float64, "sequence_len": WINDOW, **config}).eval()
    if kind == "fixed":
        tokens = torch.randn(40, DIM, dtype=module.out_proj.weight.dtype)
        module.fit_landmarks(tokens, None if module.kdim == DIM else tokens[:, : module.kdim])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def stream(length: int, module: Continual, width: int = DIM, batched: bool = True) -> Tensor:
    """Return tokens in the layout of the module."""
    tokens = torch.randn(BATCH, length, width, dtype=torch.float64).to(module.out_proj.weight.dtype)
    if not batched:
        return tokens[1]
    return tokens if module.batch_first else tokens.transpose(0, 1)


def along(module: Continual, tokens: Tensor) -> int:
    return 1 if module.batch_first and tokens.dim() >= 3 else 0


def part(module: Continual, tokens: Tensor, first: int, last: int) -> Tensor:
    return tokens.narrow(along(module, tokens), first, last - first)


def assert_equal(mine: Tensor, other: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


# ---- against continual-inference


def both(output: str, batch_first: bool, **config: Any) -> tuple[ContinualAttention, Any]:
    """Return our module and that of continual-inference, with the same weights."""
    ours = made("exact", output=output, batch_first=batch_first, **config)
    theirs = PEERS[output](
        DIM, HEADS, batch_first=batch_first, sequence_len=WINDOW, dtype=torch.float64, **config
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("config", [{}, {"bias": False}], ids=["plain", "no bias"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@torch.no_grad()
def test_what_continual_inference_gives(output: str, batch_first: bool, config: dict[str, Any]) -> None:
    ours, theirs = both(output, batch_first, **config)
    tokens = [0.3 * stream(3 * WINDOW, ours) for _ in range(3)]  # logits of about 1.5: at 15 theirs lose digits
    window = [part(ours, each, 0, WINDOW) for each in tokens]
    for mine, other in zip(ours(*window), theirs(*window), strict=True):
        assert_equal(mine, other)
    steps = list(zip(*(each.unbind(along(ours, each)) for each in tokens), strict=True))
    for at, step in enumerate(steps):
        mine, other = ours.forward_step(*step), theirs.forward_step(*step)
        assert (mine is None) == (other is None) == (at < WINDOW - 1)
        if mine is not None:
            assert_equal(mine, other)
    for first, last in ((0, WINDOW - 1), (WINDOW - 1, WINDOW), (WINDOW, 3 * WINDOW), (3, 4)):
        if first == 0:
            ours.clean_state(), theirs.clean_state()
        some = [part(ours, each, first, last) for each in tokens]
        mine, other = ours.forward_steps(*some), theirs.forward_steps(*some)
        assert (mine is None) == (other is None) == (last < WINDOW and first == 0)
        if other is not None:
            # The other package has one more dimension.
            assert_equal(mine, other.squeeze(1) if output == "single" and not batch_first else other)
    ours.clean_state(), theirs.clean_state()
    whole, other = ours.forward_steps(*tokens), theirs.forward_steps(*tokens)
    assert whole.shape[along(ours, whole)] == 2 * WINDOW + 1
    assert_equal(whole, other.squeeze(1) if output == "single" and not batch_first else other)


@torch.no_grad()
def test_self_attention_of_one_argument_is_theirs() -> None:
    for output in OUTPUTS:
        ours, theirs = both(output, True)
        tokens = 0.3 * stream(2 * WINDOW, ours)
        assert_equal(ours(tokens)[0], theirs(tokens)[0])
        assert_equal(ours.forward_steps(tokens), theirs.forward_steps(tokens))
        assert_equal(ours.forward_step(tokens[:, 3]), theirs.forward_step(tokens[:, 3]))
        kept = ours.forward_step(tokens[:, 4], update_state=False)
        assert_equal(kept, theirs.forward_step(tokens[:, 4], update_state=False))
        assert_equal(ours.forward_step(tokens[:, 4]), theirs.forward_step(tokens[:, 4]))


@torch.no_grad()
def test_large_logits_where_theirs_are_lost() -> None:
    """In float32, the raw exponentials of continual-inference are NaN for logits of 88 or more. Our stream equals its
    window."""
    ours, theirs = both("retroactive", True)
    ours, theirs = ours.float(), theirs.float()
    tokens = 3 * stream(4 * WINDOW, ours)
    mine, other = ours.forward_steps(tokens), theirs.forward_steps(tokens)
    assert other.isnan().any()
    exact = copy.deepcopy(ours).double()
    exact.clean_state()
    torch.testing.assert_close(mine[:, -1], exact(tokens[:, -WINDOW:].double())[0].float(), rtol=1e-4, atol=1e-3)


# ---- a stream is `forward` of its windows


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "kind, window, landmarks", [("exact", 11, 0), ("fixed", 11, 3), ("continual", 12, 3), ("continual", 11, 3)]
)
@torch.no_grad()
def test_steps_equal_forward(
    kind: str, window: int, landmarks: int, output: str, batch_first: bool, batched: bool
) -> None:
    """Steps equal `forward`: with fixed landmarks at every step; otherwise after each full segment if m divides n, or
    after every n tokens."""
    config = {"num_landmarks": landmarks} if landmarks else {}
    module = made(kind, sequence_len=window, output=output, batch_first=batch_first, **config)
    tokens = stream(4 * window + 2, module, batched=batched)
    every = 1 if kind != "continual" else window // landmarks if window % landmarks == 0 else window
    outs, compared, differ = [], 0, 0
    for end, token in enumerate(tokens.unbind(along(module, tokens)), start=1):
        out = module.forward_step(token)
        assert (out is None) == (end < window)
        if out is None:
            continue
        outs.append(out)
        whole = module(part(module, tokens, end - window, end), need_weights=False)[0]
        expected = whole if output == "retroactive" else whole.select(along(module, tokens), 0)
        assert out.shape == expected.shape
        if end % every == 0:
            assert_equal(out, expected)
            compared += 1
        else:
            differ += not torch.allclose(out, expected, rtol=1e-3)
    assert compared >= 4 and (every == 1 or differ > compared)
    module.clean_state()
    steps = module.forward_steps(tokens)
    assert_equal(steps, torch.stack(outs, along(module, tokens)), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", OUTPUTS)
@torch.no_grad()
def test_other_widths_and_any_chunking(kind: str, output: str) -> None:
    module = made(kind, output=output, kdim=7, vdim=5)
    tokens = [stream(40, module, width) for width in (DIM, 7, 5)]
    whole = module.forward_steps(*tokens)
    for sizes in ([10, 1, 29], [11, 29], [1] * 40, [5, 0, 20, 15]):
        module.clean_state()
        outs = [module.forward_steps(*some) for some in zip(*(each.split(sizes) for each in tokens), strict=True)]
        assert_equal(torch.cat([out for out in outs if out is not None]), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2])
@torch.no_grad()
def test_the_smallest_windows(kind: str, length: int) -> None:
    config = {} if kind == "exact" else {"num_landmarks": length}
    module = made(kind, sequence_len=length, **config)
    tokens = stream(6, module)
    outs = [module.forward_step(token) for token in tokens]
    assert [out is None for out in outs] == [True] * (length - 1) + [False] * (7 - length)
    assert_equal(outs[-1], module(tokens[-length:], need_weights=False)[0][0])


def test_forward_is_that_of_the_module_for_whole_windows() -> None:
    """`forward` equals the module for whole windows, with weights, masks and dropout; "single" returns its last row.

    No stream changes.
    """
    whole = Ours(DIM, HEADS, dtype=torch.float64)
    tokens = torch.randn(WINDOW, BATCH, DIM, dtype=torch.float64)
    mask = torch.arange(WINDOW) >= torch.tensor([[WINDOW], [7]])
    for output, rows in (("retroactive", slice(None)), ("single", slice(-1, None))):
        module = ContinualAttention(DIM, HEADS, sequence_len=WINDOW, output=output, dtype=torch.float64)
        module.load_state_dict(whole.state_dict())
        for options in (
            {},
            {"need_weights": False},
            {"key_padding_mask": mask},
            {"key_padding_mask": mask, "need_weights": False},
        ):
            out, weights = module(tokens, **options)
            expected, expected_weights = whole(tokens, tokens, tokens, **options)
            assert_equal(out, expected[rows])
            assert (weights is None) == (expected_weights is None)
            assert weights is None or torch.allclose(weights, expected_weights[:, rows])
        assert module.get_state() is None
    module = ContinualAttention(DIM, HEADS, dropout=0.9, sequence_len=WINDOW, dtype=torch.float64)
    assert not torch.equal(module(tokens)[0], module(tokens)[0])


def test_gradients_of_forward_reach_all_weights_and_landmarks() -> None:
    for kind in KINDS:
        for output in OUTPUTS:
            module = made(kind, output=output).train()
            tokens = stream(WINDOW, module).requires_grad_()
            out = module(tokens, need_weights=False)[0]
            assert out.shape[0] == (1 if output == "single" else WINDOW)
            out.square().sum().backward()
            assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())
            assert tokens.grad.abs().sum() > 0


def test_compiled_forward() -> None:
    for kind in KINDS:
        module = made(kind, output="retroactive", dtype=torch.float32)
        tokens = stream(WINDOW, module)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_equal(compiled(tokens, need_weights=False)[0], module(tokens, need_weights=False)[0], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_low_precision(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """A stream has the dtype of the module, with and without autocast, and its sums are float32."""
    module = made(kind, output="retroactive", dtype=torch.float32 if autocast else dtype)
    for parameter in module.parameters():
        parameter.mul_(0.5)
    exact = copy.deepcopy(module).double()
    tokens = stream(3 * WINDOW, module)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out = module.forward_steps(tokens[:-1])
        last = module.forward_step(tokens[-1])
    state = module.get_state()
    assert state.keys.dtype == module.out_proj.weight.dtype
    assert state.sums.dtype == torch.float32
    assert out.dtype == last.dtype == dtype
    expected = exact.forward_steps(tokens.double())
    for mine, other in ((out, expected[:-1]), (last, expected[-1])):
        assert (mine.double() - other).pow(2).mean().sqrt() <= 16 * torch.finfo(dtype).eps * other.pow(2).mean().sqrt()
    if autocast:
        module.forward_step(tokens[0])  # the stream continues without autocast


@torch.no_grad()
def test_a_window_under_inference_mode_goes_on_without() -> None:
    for kind in KINDS:
        module = made(kind)
        tokens = stream(2 * WINDOW + 4, module)
        expected = module.forward_steps(tokens)
        module.clean_state()
        with torch.inference_mode():
            outs = [module.forward_steps(tokens[:5]), module.forward_steps(tokens[5:18])]
        outs.append(module.forward_steps(tokens[18:]))
        assert_equal(torch.cat(outs[1:]), expected)


# ---- what is refused


def test_a_stream_holds_no_graph() -> None:
    for kind in KINDS:
        module = made(kind)
        tokens = stream(WINDOW, module)
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            module.forward_steps(tokens)
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            module.requires_grad_(False).forward_step(tokens[0].clone().requires_grad_())
        assert module.get_state() is None
        assert module.forward_steps(tokens) is not None  # nothing needs a gradient
        if kind == "fixed":
            module.clean_state()
            module.landmark_keys.requires_grad_(True)
            with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
                module.forward_steps(tokens)
            assert module.get_state() is None


@torch.no_grad()
def test_a_stream_has_no_dropout() -> None:
    module = made("exact", dropout=0.5).train()
    tokens = stream(WINDOW, module)
    with pytest.raises(RuntimeError, match=r"^dropout: "):
        module.forward_step(tokens[0])
    assert module.eval().forward_steps(tokens) is not None


@pytest.mark.parametrize(
    "kind, name, options",
    [
        ("exact", "sequence_len", {"sequence_len": 0}),
        ("continual", "sequence_len", {"sequence_len": 2.0}),
        ("exact", "output", {"output": "last"}),
        ("continual", "output", {"output": "both"}),
        ("exact", "add_bias_kv", {"add_bias_kv": True}),
        ("exact", "add_zero_attn", {"add_zero_attn": True}),
        ("continual", "dropout", {"dropout": 0.1}),
        ("continual", "num_landmarks", {"num_landmarks": WINDOW + 1}),
        ("continual", "num_landmarks", {"num_landmarks": 0}),
        ("continual", "landmarks", {"landmarks": "segments"}),
        ("continual", "pinv", {"pinv": "none"}),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        KINDS[kind](DIM, HEADS, **{"sequence_len": WINDOW, **options})


@torch.no_grad()
def test_fixed_landmarks_must_be_there() -> None:
    module = KINDS["fixed"](DIM, HEADS, sequence_len=4)
    tokens = torch.randn(6, BATCH, DIM)
    assert module.forward_steps(tokens[:3]) is None
    before = module.get_state()
    with pytest.raises(RuntimeError, match="fit_landmarks"):
        module.forward_step(tokens[3])
    assert same(module.get_state(), before)
    module.fit_landmarks(tokens)
    assert module.get_state() is None
    assert module.forward_steps(tokens).shape == (3, BATCH, DIM)


def same(first: Any, second: Any) -> bool:
    """Return whether two states have the same bits. A row of a ring that is outside the window has no meaning."""
    if type(first) is not type(second):
        return False
    if not isinstance(first, FillingWindow) and first is not None:
        first, second = (list(state_to_tensors(state).values()) for state in (first, second))
    return first is second or all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("filled", [0, 4, WINDOW, 2 * WINDOW + 3])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_errors_leave_the_stream(kind: str, output: str, filled: int) -> None:
    """An error at any of several tokens names the argument and does not change the stream."""
    module = made(kind, output=output)
    tokens = stream(filled + 20, module)
    module.forward_steps(tokens[:filled])
    untouched = copy.deepcopy(module)
    before = copy.deepcopy(module.get_state())  # nothing else holds the state, so its memory could be reused
    some = tokens[filled : filled + 20]
    last, middle = some.clone(), some.clone()
    last[-1, 0, 0], middle[3, 1, 2] = torch.nan, -torch.inf
    wrongs: list[tuple[type[Exception], str, tuple[Tensor, ...]]] = [
        (ValueError, "query", (some[..., :7],)),
        (ValueError, "value", (some, some, some[..., :7])),
        (TypeError, "query", (some.float(),)),
        (ValueError, "value", (some, some, some[:, :1])),
        (ValueError, "query", (last,)),
        (ValueError, "key", (some, last)),
    ]
    of_several: list[tuple[type[Exception], str, tuple[Tensor, ...]]] = [
        (ValueError, "query", (middle,)),
        (ValueError, "value", (some, some, middle)),
        (ValueError, "key", (some, some[:5])),
        (ValueError, "key", (some, some[0])),
    ]
    if filled:
        wrongs.append((ValueError, "query", (some[:, :1],)))
    for error, name, arguments in (*wrongs, *of_several):
        with pytest.raises(error, match=rf"^{name}: "):
            module.forward_steps(*arguments)
        assert same(module.get_state(), before)
    for error, name, arguments in wrongs:
        with pytest.raises(error, match=rf"^{name}: "):
            module.forward_step(*(argument[-1] for argument in arguments))
        assert same(module.get_state(), before)
    for token in some:
        mine, other = module.forward_step(token), untouched.forward_step(token)
        assert mine is other is None or torch.equal(mine, other)


def test_replaces_torchs_module() -> None:
    """The module takes over torch's own parameters, and its stream has their device and dtype."""
    for kind in KINDS:
        old = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64)
        model = nn.Sequential(old).eval()
        tokens = torch.randn(9, BATCH, DIM, dtype=torch.float64)
        new = partial(KINDS[kind], sequence_len=7, output="retroactive")
        assert replace_modules(model, {nn.MultiheadAttention: new}) == 1
        module = model[0]
        assert all(a is b for a, b in zip(module.parameters(), old.parameters(), strict=True))
        with torch.no_grad():
            if kind == "fixed":
                module.fit_landmarks(tokens)
            module.forward_steps(tokens)
            assert module.get_state().keys.dtype == torch.float64
            if kind == "exact":
                assert_equal(module.forward_step(tokens[0]), old(*3 * [torch.cat([tokens[3:], tokens[:1]])])[0])


def test_modules_are_torchs() -> None:
    for kind in KINDS:
        module = KINDS[kind](DIM, HEADS, sequence_len=WINDOW)
        assert isinstance(module, nn.MultiheadAttention)
        theirs = nn.MultiheadAttention(DIM, HEADS)
        assert str(module.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
        assert module.state_dict().keys() == theirs.state_dict().keys()
        assert pickle.loads(pickle.dumps(module)).state_dict().keys() == theirs.state_dict().keys()


# ---- training


@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("kind", ["exact", "continual", "fixed"])
@pytest.mark.parametrize("window, number", [(12, 3), (13, 5), (1, 1)])
def test_what_is_trained_is_what_is_streamed(kind: str, output: str, window: int, number: int) -> None:
    """The training form equals the steps at every token, also between replacements of landmarks, and has the gradient
    of the steps."""
    options: dict[str, Any] = {"batch_first": True, "sequence_len": window, "output": output, "dtype": torch.float64}
    if kind == "exact":
        module: Any = ContinualAttention(8, 2, **options)
    else:
        module = ContinualNystromAttention(8, 2, num_landmarks=number, landmarks=kind, **options)
    tokens = torch.randn(2, 3 * window + 2, 8, dtype=torch.float64)
    if kind == "fixed":
        module.landmark_queries, module.landmark_keys = (
            torch.nn.Parameter(torch.randn(2, number, 4).double()) for _ in range(2)
        )
    trained = module.forward_stream(tokens)
    with torch.no_grad():
        streamed = module.forward_steps(tokens)
    torch.testing.assert_close(trained, streamed, rtol=1e-12, atol=1e-12)
    assert module.forward_stream(tokens[:, : window - 1]) is None
    leaves = list(module.parameters())
    gradients = torch.autograd.grad(trained.sin().sum(), leaves)
    heads = module._heads(tokens, tokens, tokens)
    stepped = module._joined(_stepped_by_operator(module, heads), batched=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(stepped.sin().sum(), leaves), rtol=1e-9, atol=1e-9)


def _stepped_by_operator(module: Any, heads: tuple[Tensor, ...]) -> Tensor:
    """Return the outputs of a state that is stepped token by token by the operator, which records the gradient."""
    firsts, rest = zip(
        *(head.split([module.sequence_len, head.shape[2] - module.sequence_len], 2) for head in heads), strict=True
    )
    outs, state = [module._whole(*firsts)], module._init(*firsts)
    for token in zip(*(part.split(1, 2) for part in rest), strict=True):
        out, state = module._step(state, *token)
        outs.append(out)
    return torch.stack(outs, 2) if module.output == "retroactive" else torch.cat(outs, 2)


BAD_TOKENS: dict[str, tuple[type[Exception], Any]] = {
    "a list": (TypeError, [1.0] * DIM),
    "a number": (ValueError, torch.tensor(1.0, dtype=torch.float64)),
    "another width": (ValueError, torch.zeros(BATCH, 7, dtype=torch.float64)),
    "several tokens": (ValueError, torch.zeros(BATCH, 1, DIM, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
@pytest.mark.parametrize("kind", ["exact", "continual"])
@torch.no_grad()
def test_what_is_no_token_is_named(kind: str, name: str) -> None:
    """The error shows the shape that was given, without the axis that a step adds."""
    module, (error, given) = made(kind), BAD_TOKENS[name]
    token = stream(1, module)[0]
    module.forward_step(token)
    before = copy.deepcopy(module.get_state())
    shown = rf".*{re.escape(str(tuple(given.shape)))}" if isinstance(given, Tensor) else ""
    for argument, tokens in (("query", (given,)), ("key", (token, given)), ("value", (token, token, given))):
        with pytest.raises(error, match=rf"^{argument}:{shown}"):
            module.forward_step(*tokens)
    with pytest.raises(TypeError, match=r"^query: got None"):
        module.forward_step(None)
    assert same(module.get_state(), before)


@torch.no_grad()
def test_a_key_of_another_width_is_needed() -> None:
    module = made("exact", kdim=7)
    with pytest.raises(ValueError, match=rf"^key: got shape \({BATCH}, {DIM}\)"):
        module.forward_step(stream(1, module)[0])


def test_a_seed_out_of_range_is_named() -> None:
    module = made("fixed")
    landmarks = module.landmark_queries
    for seed in (-1, 2**32, 0.5, None, True):
        with pytest.raises(ValueError, match=r"^seed: "):
            module.fit_landmarks(torch.randn(40, DIM, dtype=torch.float64), seed=seed)
        assert module.landmark_queries is landmarks
