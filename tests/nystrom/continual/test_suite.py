"""The continual steps under the suite that every operator inherits: a first window, then the tokens that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.nystrom import costs
from cmab_kernels.testing import Measured, OperatorSuite, oracles
from cmab_kernels.testing.suite import DTYPES

from .step_cases import FADING, check_the_largest_of_huge_logits_leaves, check_values_that_fade

Results = tuple[Tensor, ...]
WINDOW = 7


class StepSuite(OperatorSuite):
    """Call `init` with the first window, then one step with all further tokens.

    Kernels run without gradients; with gradients the definition runs.
    """

    arguments = {"query": "BHND", "key": "BHND", "value": "BHNE"}
    logits = (("query",), ("key",))
    extents = {"B": 2, "H": 3, "N": WINDOW + 3, "D": 8, "E": 5}
    small = {"B": 1, "H": 1, "N": WINDOW + 1, "D": 2, "E": 1}
    shapes = ({"N": WINDOW + 1}, {"N": WINDOW + 20, "D": 16, "E": 24})
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    laws = ("normal", "ten times", "all equal")
    impls = ("reference", "native")
    repeatable = ("native",)
    ungraded = True
    captured = False  # captured streams have a test of their own
    on_gpu = {"dtypes": DTYPES}
    empty = "BH"
    test_a_bad_batch_element_stays_alone = None  # tokens that are not finite raise an error
    test_compile = None  # a compiled stream is tested below: with gradients it is the definition, unrolled

    def step(self, state: Any, *tokens: Tensor, impl: str) -> Tensor:
        step = ck.continual_nystrom_step if isinstance(state, ck.ContinualNystromState) else ck.continual_attention_step
        return step(state, *tokens, impl=impl).out

    def call(self, impl: str, query: Tensor, key: Tensor, value: Tensor, **landmarks: Tensor) -> Results:
        first = [t[:, :, :WINDOW] if isinstance(t, Tensor) and t.dim() > 2 else t for t in (query, key, value)]
        state = self.init(*first, **landmarks)
        return (self.step(state, *(t[:, :, WINDOW:] for t in (query, key, value)), impl=impl),)

    def init(self, query: Tensor, key: Tensor, value: Tensor, **landmarks: Tensor) -> Any:
        raise NotImplementedError

    def row_sizes(self, found: Measured) -> Tensor:
        size = found.right.norm(dim=-1)
        return size.maximum(0.05 * size.amax(-1, keepdim=True))

    def torch_errors(self, error: Tensor) -> Tensor:
        return error.nan_to_num(1.0, 1.0).amax(-1, keepdim=True)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], inputs["key"])

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Leave out gradients if a softmax saturates or all inputs are equal, because they are differences that vanish.

        The tests of attention bound them.
        """
        return law == "normal" or not is_gradient or name == "value"


class TestContinualAttention(StepSuite):
    """Exact attention of each new token over its window."""

    operator = "continual_attention_step"

    def init(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return ck.continual_attention_init(query, key, value)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        ends = range(WINDOW + 1, query.shape[2] + 1)
        rows = [
            self.row(query[:, :, end - 1 : end], *(t[:, :, end - WINDOW : end] for t in (key, value))) for end in ends
        ]
        return (torch.cat(rows, 2),)

    def row(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


class TestFixedLandmarks(StepSuite):
    """Nyström attention of each new token over its window, with fixed landmarks."""

    operator = "continual_nystrom_step"
    arguments = {**StepSuite.arguments, "near": "HMD", "far": "HMD"}
    logits = (("query", "near"), ("key", "far"))
    extents = {**StepSuite.extents, "M": 4}
    small = {**StepSuite.small, "M": 2}
    test_only_the_gradients_that_are_asked_for = None  # `test_gradients_through_a_stream` takes some
    accepted = ("near of another dtype", "far of another dtype")
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}
    gradient_tolerance = 1e-8

    def init(self, query: Tensor, key: Tensor, value: Tensor, near: Tensor, far: Tensor) -> Any:
        return ck.continual_nystrom_init(query, key, value, landmarks=(near, far))

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, near: Tensor, far: Tensor) -> Results:
        ends = range(WINDOW + 1, query.shape[2] + 1)
        rows = [
            oracles.nystrom_attention(
                query[:, :, end - 1 : end], *(t[:, :, end - WINDOW : end] for t in (key, value)), (near, far)
            )
            for end in ends
        ]
        return (torch.cat(rows, 2),)

    def torch_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.float64 else dtype

    def score(self, inputs: dict[str, Tensor]) -> float:
        near, far = inputs["near"][None], inputs["far"][None]
        pairs = (inputs["query"], far), (near, inputs["key"]), (near, far)
        return max(oracles.largest_score(*pair) for pair in pairs)


# ---- checks of the steps alone


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, 7, width, dtype=torch.float64) for width in (3, 3, 2))
    return q, k, v


def test_autocast() -> None:
    q, k, v = (t.float() for t in _tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = ck.continual_nystrom_init(q, k, v, 3)
        out, state = ck.continual_nystrom_step(state, *(t[:, :, :1] for t in (q, k, v)))
    assert out.dtype == state.keys.dtype == torch.bfloat16 and state.sums.dtype == torch.float32


@pytest.mark.parametrize("exact", [False, True])
def test_a_state_with_gaps_in_its_memory_goes_through_the_dispatcher(exact: bool) -> None:
    q, k, v = _tokens()
    state = ck.continual_attention_init(q, k, v) if exact else ck.continual_nystrom_init(q, k, v, 3)
    step = ck.continual_attention_step if exact else ck.continual_nystrom_step
    permuted = state._make(
        torch.stack(field.unbind(1)).movedim(0, 1) if isinstance(field, Tensor) and field.dim() > 1 else field
        for field in state
    )
    token = [t[:, :, :1] for t in (q, k, v)]
    wanted = step(state, *token).out
    with FlopCounterMode(display=False):  # a mode that sees every call
        torch.testing.assert_close(step(permuted, *token).out, wanted)


def test_more_landmarks_than_tokens_are_refused() -> None:
    q, k, v = _tokens()
    near = torch.randn(2, q.shape[2] + 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^landmarks\[0\]: got 8 landmarks, expected at most 7"):
        ck.continual_nystrom_init(q, k, v, landmarks=(near, near))


def test_vmap_of_streams() -> None:
    """`vmap` steps streams at different positions, one for each sample."""
    states, tokens = [], [torch.randn(2, 2, 2, 1, w, dtype=torch.float64) for w in (3, 3, 2)]
    for seen in (0, 5):
        q, k, v = _tokens()
        state = ck.continual_nystrom_init(q, k, v, 3)
        for i in range(seen):
            state = ck.continual_nystrom_step(state, *(t[:, :, i : i + 1] for t in (q, k, v))).state
        states.append(state)
    fields = [torch.stack(field) if isinstance(field[0], Tensor) else field[0] for field in zip(*states, strict=True)]

    def step(tensors: list[Tensor], *token: Tensor) -> Tensor:
        out: Tensor = ck.continual_nystrom_step(ck.ContinualNystromState(*tensors, *fields[10:]), *token).out
        return out

    ours = torch.vmap(step)(fields[:10], *tokens)
    wanted = torch.stack(
        [ck.continual_nystrom_step(state, *(t[i] for t in tokens)).out for i, state in enumerate(states)]
    )
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


def test_vmap_of_a_step() -> None:
    """`vmap` steps one state with several alternative next tokens."""
    q, k, v = _tokens()
    state = ck.continual_nystrom_init(q, k, v, 3)
    several = [torch.randn(4, *t[:, :, :1].shape, dtype=torch.float64) for t in (q, k, v)]
    ours = torch.vmap(lambda *token: ck.continual_nystrom_step(state, *token).out)(*several)
    wanted = torch.stack([ck.continual_nystrom_step(state, *(t[i] for t in several)).out for i in range(4)])
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("exact", [False, True])
def test_compiled_steps(impl: str, exact: bool, output: str) -> None:
    """A compiled function takes a stream's state, steps it, and returns it."""
    q, k, v = _tokens()
    state = ck.continual_attention_init(q, k, v) if exact else ck.continual_nystrom_init(q, k, v, 3)
    step = ck.continual_attention_step if exact else ck.continual_nystrom_step

    def run(state: Any, *token: Tensor) -> Any:
        return step(state, *token, output=output, impl=impl)

    compiler = CompileCounterWithBackend("aot_eager")
    compiled, other = torch.compile(run, fullgraph=True, backend=compiler), state
    for i in range(5):
        token = [t[:, :, i : i + 1] for t in (q, k, v)]
        out, state = run(state, *token)
        again, other = compiled(other, *token)
        torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-13)
    assert (other.position == 12).all() and (state.position == 12).all()
    assert compiler.frame_count <= 3  # graphs do not depend on a position


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("output", ["single", "retroactive"])
def test_flops_of_steps(fixed: bool, output: str) -> None:
    q, k, v = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 5)
    chosen = {"landmarks": (torch.randn(3, 4, 8), torch.randn(3, 4, 8))} if fixed else {"num_landmarks": 4}
    state = ck.continual_nystrom_init(q, k, v, **chosen)
    exact = ck.continual_attention_init(q, k, v)
    for tokens in (1, 3, 30):
        with FlopCounterMode(display=False) as counter:
            _, new = ck.continual_nystrom_step(state, *(t[:, :, :tokens] for t in (q, k, v)), output=output)
        wanted = costs.mean_operations(40, 4, 8, 5, tokens, 6, fixed, output == "retroactive")
        assert counter.get_total_flops() == round(6 * wanted)
        state = new
        with FlopCounterMode(display=False) as counter:
            _, new_exact = ck.continual_attention_step(exact, *(t[:, :, :tokens] for t in (q, k, v)), output=output)
        first = output == "retroactive" and exact.sums.shape[2] == 0
        wanted = costs.executed_attention_operations(40, 8, 5, tokens, output == "retroactive", first)
        assert counter.get_total_flops() == 6 * wanted
        exact = new_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_of_huge_logits_leaves(impl: str, dtype: torch.dtype) -> None:
    check_the_largest_of_huge_logits_leaves(
        lambda state, token: ck.continual_nystrom_step(state, *token, impl=impl).state, dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("law", FADING)
def test_values_that_fade(impl: str, law: str, dtype: torch.dtype) -> None:
    check_values_that_fade(lambda state, token: ck.continual_nystrom_step(state, *token, impl=impl).state, law, dtype)
