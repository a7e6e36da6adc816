"""`nn.CMAB` is the papers' block, as a stream or at once, in constant memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels
from cmab_kernels.nn import CMAB, CMABStack
from cmab_kernels.nn.cmab import layers, one_call
from cmab_kernels.nn.parts import projects_inside

from .cmab_cases import BATCH, BLOCK, DIM, HEADS, INPUTS, LATENTS, block, close, definition, points

# The definition
# ----------------------------------------------------------------------------------------------------------------------


def test_parameter_count_of_the_paper() -> None:
    assert sum(parameter.numel() for parameter in CMAB(64, 128, 4).parameters()) == 174_848


@pytest.mark.parametrize("masked", [False, True])
def test_definition_and_all_gradients(masked: bool) -> None:
    module = block()
    inputs, latents = (tensor.requires_grad_() for tensor in points())
    ignore = torch.rand(BATCH, INPUTS) < 0.4 if masked else None
    weights = dict(module.named_parameters())
    leaves = [inputs, latents, *weights.values()]
    mine, other = module(inputs, latents, key_padding_mask=ignore), definition(weights, inputs, latents, ignore)
    assert mine.std() > 0.5
    close(mine, other)
    close(torch.autograd.grad(mine.sin().sum(), leaves), torch.autograd.grad(other.sin().sum(), leaves), 1e-11)


def test_latents_may_be_shared_over_the_batch() -> None:
    module = block()
    inputs, latents = points()
    shared = latents[0].requires_grad_()
    whole, one = module(inputs, shared.expand(BATCH, -1, -1)), module(inputs, shared)
    close(one, whole)
    close(torch.autograd.grad(one.sin().sum(), shared), torch.autograd.grad(whole.sin().sum(), shared))


def test_block_latents_are_a_shared_query(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    read = layers.projected_attention_state
    monkeypatch.setattr(
        layers, "projected_attention_state", lambda q, *a, **k: shapes.append(q.shape) or read(q, *a, **k)
    )
    module = block()
    module.update(*points(), module.init_state(BATCH))
    assert shapes[0] == (HEADS, BLOCK, DIM // HEADS)


def test_a_block_is_one_call_or_one_operator_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is one native call; with a hook on one part, there is one operator for each of the other layers."""
    calls = []
    for place, name in ((one_call, "stacked"), (layers, "feed_forward"), (layers, "attention")):
        operator = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *a, name=name, operator=operator, **k: calls.append(name) or operator(*a, **k)
        )
    module, (inputs, latents) = block(), points()
    module(inputs, latents)
    assert calls == ["stacked"]
    with cmab_kernels.use_impl("reference"):
        module(inputs, latents)
    with torch.autocast("cpu", torch.bfloat16):
        block(torch.float32)(inputs.float(), latents.float())
    assert len(calls) == 1  # without a kernel, and under autocast, torch's own operations run
    module.retrieve.self_feed_forward.expand.register_forward_hook(lambda _module, _given, result: result)
    module(inputs, latents)
    assert sorted(calls[1:]) == ["attention"] * 3 + ["feed_forward"] * 3


@pytest.mark.parametrize("width, inside", [(65, True), (256, True), (257, False)])
def test_keys_on_a_gpu_are_written_where_heads_are_wide(
    width: int, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, no kernel projects heads wider than 256, and the definition would store all scores."""
    launch = pytest.importorskip("cmab_kernels.attention.projected.triton.launch", exc_type=ImportError)
    monkeypatch.setattr(launch, "device_problem", lambda _: None)
    with FakeTensorMode():
        query, inputs, weight = (
            torch.empty(*shape, device="cuda") for shape in ((2, 8, width), (1, 9, 4), (2 * width, 4))
        )
        assert projects_inside(query, inputs, weight, weight) is inside


def test_padding_may_hold_anything_and_sets_may_be_empty() -> None:
    module = block()
    inputs, latents = points()
    ignore = torch.zeros(BATCH, INPUTS, dtype=torch.bool)
    ignore[0], ignore[1, 7:] = True, True
    inputs[ignore] = torch.nan
    leaves = [inputs.requires_grad_(), *module.parameters()]
    expected = torch.cat([module(inputs[:1, :0], latents[:1]), module(inputs[1:, :7], latents[1:])])
    result = module(inputs, latents, key_padding_mask=ignore)
    close(result, expected)
    assert expected.isfinite().all()
    gradients = torch.autograd.grad(result.sin().sum(), leaves)
    close(gradients, torch.autograd.grad(expected.sin().sum(), leaves, materialize_grads=True), 1e-11)
    assert not gradients[0][ignore].any()
    assert module(inputs[:0], latents[:0]).shape == (0, LATENTS, DIM)


# Streaming
# ----------------------------------------------------------------------------------------------------------------------


def stream(module: CMAB, inputs: Tensor, latents: Tensor, split: list[int]) -> Any:
    state = module.init_state(BATCH)
    for chunk in inputs.split(split, 1):
        result, state = module.update(chunk, latents, state)
    return result, state


@pytest.mark.parametrize("split", [[41], [1] * 41, [0, 20, 0, 21], [40, 1], [1, 40]])
def test_updates_equal_one_pass_with_gradients(split: list[int]) -> None:
    module = block()
    inputs, latents = (tensor.requires_grad_() for tensor in points())
    streamed, expected = stream(module, inputs, latents, split)[0], module(inputs, latents)
    leaves = [inputs, latents, *module.parameters()]
    close(streamed, expected)
    close(torch.autograd.grad(streamed.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), 1e-11)


def test_every_split_in_two() -> None:
    module, (inputs, latents) = block(), points()
    with torch.no_grad():
        expected = module(inputs, latents)
        for first in range(INPUTS + 1):
            close(stream(module, inputs, latents, [first, INPUTS - first])[0], expected)


def test_gradient_of_the_states() -> None:
    """Gradients flow through `out` and `lse` of a state:
    a stream of two chunks is differentiated at the state between them."""
    module, (inputs, latents) = block(), points()
    state = module.update(inputs[:, :20], latents, module.init_state(BATCH)).state

    def rest(out: Tensor, lse: Tensor) -> Tensor:
        return module.update(inputs[:, 20:], latents, cmab_kernels.AttentionState(out, lse)).latents.sum()

    assert torch.autograd.gradcheck(rest, tuple(part.detach().requires_grad_() for part in state), fast_mode=True)


@pytest.mark.parametrize("rows", [1, 7, 40, 41, 100])
def test_chunks_without_gradients_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (inputs, latents) = block(), points()
    ignore = torch.rand(BATCH, INPUTS) < 0.4
    expected = module.update(inputs, latents, module.init_state(BATCH), key_padding_mask=ignore)
    monkeypatch.setattr(layers, "CHUNK", rows)
    with torch.no_grad():
        close(module.update(inputs, latents, module.init_state(BATCH), key_padding_mask=ignore), expected)
        close(module(inputs, latents, key_padding_mask=ignore), expected.latents)


class LargestAllocation(TorchDispatchMode):
    """Record the number of elements of the largest new tensor; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {tensor.untyped_storage().data_ptr() for tensor in tree_iter(args) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.numel = max(self.numel, tensor.numel())
        return result


def largest_allocation(module: CMAB, count: int, grad: bool) -> int:
    inputs, latents = torch.randn(1, count, DIM), torch.randn(LATENTS, DIM)
    ignore = torch.rand(1, count) < 0.1
    with LargestAllocation() as largest, torch.set_grad_enabled(grad):
        module(inputs, latents, key_padding_mask=ignore)
        result = module.update(inputs, latents, module.init_state(1), key_padding_mask=ignore)
        if grad:
            result.latents.sum().backward()
    return largest.numel


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_of_size_n_is_allocated(grad: bool) -> None:
    module = block(torch.float32)
    assert largest_allocation(module, 4 * 64, grad) == largest_allocation(module, 50 * 64, grad)
    with LargestAllocation() as largest:  # shows that the measurement notices large tensors
        module.compress.cross_attention.context_norm(torch.randn(1, 50 * 64, DIM))
    assert largest.numel >= 50 * 64 * DIM


def test_removal_forgets() -> None:
    module, (inputs, latents) = block(), points()
    seen = module.update(inputs, latents, module.init_state(BATCH)).state
    result, state, reliable = module.remove(inputs[:, :9], latents, seen)
    close((result, state), tuple(module.update(inputs[:, 9:], latents, module.init_state(BATCH))), 1e-8)
    assert reliable.shape == (BATCH, HEADS, BLOCK)
    assert reliable.all()
    ignore = (torch.arange(9) < 3).expand(BATCH, 9)
    left = module.remove(inputs[:, :9], latents, seen, key_padding_mask=ignore).state
    stayed = torch.cat([inputs[:, :3], inputs[:, 9:]], 1)
    close(left, module.update(stayed, latents, module.init_state(BATCH)).state, 1e-8)
    nothing = module.remove(inputs, latents, seen)
    assert not nothing.reliable.any()


def test_removal_in_chunks_is_one_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (inputs, latents) = block(), points()
    seen = module.update(inputs, latents, module.init_state(BATCH)).state
    ignore = torch.rand(BATCH, 30) < 0.5
    expected = module.remove(inputs[:, :30], latents, seen, key_padding_mask=ignore)
    monkeypatch.setattr(layers, "CHUNK", 4)
    with torch.no_grad():
        close(
            tuple(module.remove(inputs[:, :30], latents, seen, key_padding_mask=ignore))[:2], tuple(expected)[:2], 1e-9
        )


def test_states_of_parts_merge() -> None:
    module, (inputs, latents) = block(), points()
    parts = [module.update(part, latents, module.init_state(BATCH)).state for part in inputs.split([3, 0, 30, 8], 1)]
    merged = module.update(inputs[:, :0], latents, cmab_kernels.merge_states(*parts))
    close(merged.latents, module(inputs, latents))


# The module's own stream
# ------------------------------------------------------------------------------------------------------------------


def test_own_stream() -> None:
    module, (inputs, latents) = block(), points()
    assert module.stream.state is None
    with torch.no_grad():
        for chunk in inputs.split(10, 1):
            result, state = module.update(chunk, latents)
            assert module.stream.state is not None
            assert torch.equal(module.stream.state.out, state.out)
            # Touches no state.
            close(module(chunk, latents), definition(dict(module.named_parameters()), chunk, latents))
            module.update(chunk, latents, module.init_state(BATCH))  # a stream of the caller does not change either
        close(result, module(inputs, latents))
        close(module.remove(inputs[:, :10], latents).latents, module(inputs[:, 10:], latents), 1e-8)
        close(module.update(inputs[:, :10], latents).latents, module(inputs, latents), 1e-8)
        module.stream.state = None
        close(module.update(inputs, latents).latents, module(inputs, latents))


def test_own_stream_survives_errors() -> None:
    module, (inputs, latents) = block(), points()
    with torch.no_grad():
        module.update(inputs[:, :10], latents)
        before = module.stream.state
        bad = [
            (inputs[:1], latents),
            (inputs, latents[..., :3]),
            (inputs.float(), latents),
            (inputs[:1], latents[:1]),
            (inputs[0], latents),
        ]
        for arguments in bad:
            for method in (module.update, module.remove):
                with pytest.raises((ValueError, TypeError)):
                    method(*arguments)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        module.update(inputs, latents)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        module.remove(inputs[:, :3], latents)
    assert module.stream.state is not None
    assert all(a is b for a, b in zip(module.stream.state, before, strict=True))


def test_errors_name_the_argument() -> None:
    module, (inputs, latents) = block(), points()
    bad: list[tuple[str, type[Exception], tuple[Any, ...], dict[str, Any]]] = [
        ("inputs", ValueError, (inputs[0], latents), {}),
        ("inputs", ValueError, (inputs[..., :3], latents), {}),
        ("inputs", TypeError, (inputs.half(), latents), {}),
        ("inputs", ValueError, (inputs.to("meta"), latents), {}),
        ("latents", ValueError, (inputs, latents[..., :3]), {}),
        ("latents", ValueError, (inputs, latents[:1]), {}),
        ("latents", ValueError, (inputs, latents[None]), {}),
        ("latents", TypeError, (inputs, latents.float()), {}),
        (
            "key_padding_mask",
            ValueError,
            (inputs, latents),
            {"key_padding_mask": torch.zeros(BATCH, 3, dtype=torch.bool)},
        ),
        ("key_padding_mask", TypeError, (inputs, latents), {"key_padding_mask": torch.zeros(BATCH, INPUTS)}),
        ("state.out", ValueError, (inputs, latents, module.init_state(BATCH + 1)), {}),
        ("state", TypeError, (inputs, latents, "state"), {}),
    ]
    for name, error, arguments, options in bad:
        for grad in (False, True):
            with torch.set_grad_enabled(grad), pytest.raises(error, match=rf"^{name}: "):
                module.update(*arguments, **options)
    with pytest.raises(RuntimeError, match="seen nothing"):
        module.remove(inputs, latents)
    sizes = {"dim": 12, "num_latents": 4, "num_heads": 3, "ff_dim": 8}
    for name, bad_size in {"dim": 0, "num_latents": -1, "num_heads": 5, "ff_dim": 0}.items():
        for size in (bad_size, float(sizes[name])):
            with pytest.raises(ValueError, match=rf"^{name}: got {size}"):
                CMAB(**{**sizes, name: size})


# Everywhere else
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_compile() -> None:
    module, (inputs, latents) = block(), points()
    expected = module(inputs, latents)
    result = torch.compile(module, fullgraph=True, backend="aot_eager")(inputs, latents)
    close(result, expected)
    leaves = list(module.parameters())
    close(torch.autograd.grad(result.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), 1e-11)


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_stream(own: bool) -> None:
    """A compiled update works, also for the module's own stream, which is a side effect."""
    module, (inputs, latents) = block(), points()
    step = torch.compile(module.update, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        state = module.init_state(BATCH)
        for chunk in inputs.split([5, 20, 16], 1):
            streamed, state = step(chunk, latents, None if own else state)
        close(streamed, module(inputs, latents))
    assert (module.stream.state is not None) == own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype: torch.dtype, autocast: bool) -> None:
    """The block is as accurate as the definition in the same precision, and its state is float32."""
    module, (inputs, latents) = CMAB(DIM, BLOCK, HEADS), points(torch.float32)
    with torch.no_grad():
        truth = definition(
            {name: p.double() for name, p in module.named_parameters()}, inputs.double(), latents.double()
        )
        held = torch.float32 if autocast else dtype
        module, inputs, latents = module.to(held), inputs.to(held), latents.to(held)
        with torch.autocast("cpu", dtype, enabled=autocast):
            result, state = stream(module, inputs, latents, [20, 1, 20])
            other = definition(dict(module.named_parameters()), inputs, latents)
    assert state.out.dtype == torch.float32
    error, others_error = ((x.double() - truth).pow(2).mean().sqrt() for x in (result, other))
    assert error <= 2 * others_error
    assert (result.dtype == dtype) or autocast


def test_checkpoint_functional_call_and_copy() -> None:
    module, (inputs, latents) = block(), points()
    expected = module(inputs, latents)
    leaves = list(module.parameters())
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    again = checkpoint(module, inputs, latents, use_reentrant=False)
    close(torch.autograd.grad(again.sin().sum(), leaves), gradients, 1e-11)
    weights = {name: parameter.detach() * 0.5 for name, parameter in module.named_parameters()}
    close(torch.func.functional_call(module, weights, (inputs, latents)), definition(weights, inputs, latents))
    with torch.no_grad():
        module.update(inputs[:, :20], latents)
        copied = copy.deepcopy(module)
        close(copied.update(inputs[:, 20:], latents).latents, expected)
        close(module.update(inputs[:, 20:], latents).latents, expected)


def test_constructed_where_it_is_told() -> None:
    module = CMAB(DIM, BLOCK, HEADS, ff_dim=5, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module.compress.cross_feed_forward.contract.weight.shape == (DIM, 5)
    assert module.init_state(3).out.device.type == "meta"


@pytest.mark.parametrize("kind", [CMAB, CMABStack])
@pytest.mark.parametrize("shared", [False, True])
def test_operations_are_counted_without_gradients_too(kind: Any, shared: bool) -> None:
    """torch's counter puts hooks on all modules; these fail for a view of a leaf,
    and in inference mode for a parameter."""
    module = kind(DIM, BLOCK, HEADS, **({"depth": 2} if kind is CMABStack else {}))
    inputs, latents = points(torch.float32)
    latents = latents[0] if shared else latents

    def count(method: Any, mode: Any, needed: bool) -> int:
        given = [each.detach().requires_grad_(needed) for each in (inputs, latents)]
        with mode(), FlopCounterMode(display=False) as counter:
            method(*given)
        return counter.get_total_flops()

    def update(inputs: Tensor, latents: Tensor) -> Any:
        return module.update(inputs, latents, module.init_state(BATCH))

    for method in (module, update):
        expected = count(method, torch.enable_grad, True)
        assert (
            expected > 0
            and count(method, torch.no_grad, True) == count(method, torch.inference_mode, False) == expected
        )
