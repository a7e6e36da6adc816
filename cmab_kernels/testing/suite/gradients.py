"""Checks of P8: derivatives of any order are right, under every transform, or raise an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from .declaration import Declaration, Results, together

TORCHS_OWN = ("aten", "prim", "prims", "profiler", "inductor", "quantized", "higher_order")


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records the first call of each operator that is not torch's own, with copies of its
    arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in TORCHS_OWN and not any(func is seen for seen, _ in self.calls):
            self.calls.append((func, tree_map_only(Tensor, lambda a: a.detach().clone(), args)))
        return func(*args, **kwargs or {})


def _squares(results: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all finite elements."""
    total = [r.masked_fill(~r.detach().isfinite(), 0.0).pow(2).sum() for r in results]
    return sum(total[1:], start=total[0])


class Gradients(Declaration):
    """Checks of derivatives, and of an operator under torch's compiler, vmap, autocast and opcheck."""

    def _graded_call(self, impl: str) -> tuple[Callable[..., Results], tuple[Tensor, ...]]:
        function, tensors = self.function_of(impl, self.small_inputs())
        return function, tuple(t.detach().requires_grad_() for t in tensors)

    # ---- derivatives

    def test_gradcheck(self, impl: str) -> None:
        function, tensors = self._graded_call(impl)
        assert torch.autograd.gradcheck(function, tensors, check_batched_grad=self.batched_gradcheck)

    def test_gradgradcheck(self, impl: str) -> None:
        """Second derivatives in random directions are right; `test_any_order` compares each of them."""
        function, tensors = self._graded_call(impl)
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)

    @together("subset")
    def test_only_the_gradients_that_are_asked_for(self, impl: str, subset: tuple[str, ...]) -> None:
        """If only some arguments require gradients, these gradients are right, to second order."""
        function, tensors = self.function_of(impl, self.small_inputs())
        some = tuple(
            t.detach().requires_grad_() if name in subset else t for name, t in zip(self.graded, tensors, strict=True)
        )
        checks = torch.autograd.gradcheck, torch.autograd.gradgradcheck
        assert all(check(function, some, fast_mode=True) for check in checks)

    @together("order")
    def test_any_order(self, optimised: str, order: int) -> None:
        """Derivatives up to the third order equal those of the definition."""
        inputs = self.small_inputs()
        found = []
        for impl in (optimised, self.definition):
            function, tensors = self.function_of(impl, inputs)
            leaves = tuple(t.detach().requires_grad_() for t in tensors)
            total = _squares(function(*leaves))
            for _ in range(order):
                grads = torch.autograd.grad(total, leaves, create_graph=True)
                total = _squares(grads)
            found.append(grads)
        size = max(float(right.detach().abs().max()) for right in found[1])
        for ours, right in zip(*found, strict=True):
            torch.testing.assert_close(
                ours, right, rtol=self.gradient_tolerance, atol=1e-3 * self.gradient_tolerance * size
            )

    def test_forward_mode(self, optimised: str, forward_mode_of: str) -> None:
        """A forward-mode derivative equals that of reverse mode."""
        function, (tensor,) = self.function_of(optimised, self.small_inputs(), [forward_mode_of])
        direction = torch.randn_like(tensor)
        ours = torch.func.jvp(function, (tensor,), (direction,))[1]
        right = torch.autograd.functional.jvp(function, (tensor,), (direction,))[1]
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)

    @together("outer")
    def test_derivatives_of_forward_mode(self, optimised: str, outer: str) -> None:
        """A forward-mode derivative in all arguments, differentiated again in either mode, equals two derivatives in
        reverse mode."""
        function, tensors = self.function_of(optimised, self.small_inputs())
        directions = tuple(torch.randn_like(t) for t in tensors)

        def slope(*given: Tensor) -> Tensor:
            along: Tensor = torch.func.jvp(lambda *t: _squares(function(*t)), given, directions)[1]
            return along

        leaves = tuple(t.detach().requires_grad_() for t in tensors)
        grads = torch.autograd.grad(_squares(function(*leaves)), leaves, create_graph=True)
        right = torch.autograd.grad(grads, leaves, directions)
        if outer == "forward":
            ours = (torch.func.jvp(slope, tensors, directions)[1],)
            right = (torch.stack([(r * d).sum() for r, d in zip(right, directions, strict=True)]).sum(),)
        else:
            ours = torch.func.grad(slope, tuple(range(len(tensors))))(*tensors)
        size = max(float(r.abs().max()) for r in right)
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=self.gradient_tolerance, atol=self.gradient_tolerance * size)

    def test_checkpointing(self, impl: str) -> None:
        function, tensors = self._graded_call(impl)
        plain = torch.autograd.grad(_squares(function(*tensors)), tensors)
        again = torch.autograd.grad(_squares(checkpoint(function, *tensors, use_reentrant=False)), tensors)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))

    # ---- what torch does with an operator

    def test_opcheck(self, optimised: str) -> None:
        """torch.library.opcheck accepts every operator that the call and its gradients reach, with the arguments of
        that call."""
        function, tensors = self._graded_call(optimised)
        with _Recorder() as recorder:
            with torch.no_grad():
                function(*tensors)
            torch.autograd.grad(_squares(function(*tensors)), tensors)
        assert recorder.calls, (
            f"{self.operator} with impl={optimised!r} calls no operator that is registered with torch"
        )
        for operator, args in recorder.calls:
            found = torch.library.opcheck(operator, args)
            assert set(found.values()) == {"SUCCESS"}, (operator, found)

    def test_compile(self, compiled: tuple[str, str], dynamic: bool) -> None:
        """The whole graph, compiled with static and with dynamic shapes, gives the same results and gradients."""
        torch._dynamo.reset()
        impl, backend = compiled
        function, tensors = self._graded_call(impl)
        ours = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)(*tensors)
        right = function(*tensors)
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=self.gradient_tolerance, atol=self.gradient_tolerance)
        gradients = (torch.autograd.grad(_squares(results), tensors) for results in (ours, right))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(
                a, b, rtol=self.gradient_tolerance, atol=self.gradient_tolerance * (1 + float(b.abs().max()))
            )

    def test_vmap(self, impl: str, mapped: str) -> None:
        """vmap of the call and of its gradient equals a loop: over all arguments, or over the first (dim -1) together
        with the last (dim 0)."""
        function, tensors = self.function_of(impl, self.small_inputs())
        several = [self.small_inputs() for _ in range(3)]
        dims: list[int | None] = [0] * len(tensors) if mapped == "all" else [None] * len(tensors)
        if mapped == "some":
            dims[0], dims[-1] = -1, 0
        stacked = [
            t if dim is None else torch.stack([one[name] for one in several], dim)
            for name, t, dim in zip(self.graded, tensors, dims, strict=True)
        ]
        each = [
            tuple(t if dim is None else one[name] for name, t, dim in zip(self.graded, tensors, dims, strict=True))
            for one in several
        ]

        def loss(*args: Tensor) -> Tensor:
            return sum(r.masked_fill(~r.isfinite(), 0.0).pow(2).sum() for r in function(*args))  # type: ignore[return-value]

        tolerance = self.gradient_tolerance
        for i, ours in enumerate(zip(*torch.vmap(function, in_dims=tuple(dims))(*stacked), strict=True)):
            for a, b in zip(ours, function(*each[i]), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        positions = tuple(range(len(tensors)))
        for i, ours in enumerate(
            zip(*torch.vmap(torch.func.grad(loss, positions), in_dims=tuple(dims))(*stacked), strict=True)
        ):
            for a, b in zip(ours, torch.func.grad(loss, positions)(*each[i]), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * (1 + float(b.abs().max())))

    def test_autocast(self, impl: str, cast: bool) -> None:
        """Results under autocast equal those of arguments cast by hand. Gradients are finite and have the arguments'
        dtypes."""
        inputs = self.inputs(torch.float32)
        leaves = self.leaves(inputs)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            ours = self.call(impl, **leaves)
        right = self.call(impl, **{n: t.bfloat16() if n in self.autocast else t for n, t in inputs.items()})
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b)
        finite = [r.float().masked_fill(r.isinf(), 0.0).sum() for r in ours]
        grads = torch.autograd.grad(finite, [leaves[n] for n in self.autocast])
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
