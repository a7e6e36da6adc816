"""Checks of numbers: P1 (finite), P2 (accurate), P3 (the same bits) and P5 (any layout)."""

from __future__ import annotations

import math

import torch

from ..bounds import bound
from ..layouts import LAYOUTS, lazily_negated
from .declaration import Declaration, Inputs, Measured, Results, together


def same_bits(a: Results, b: Results) -> bool:
    """Return whether all are equal bit for bit. NaNs count as equal."""
    return all(
        x.dtype == y.dtype and torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(a, b, strict=True)
    )


class Numerics(Declaration):
    """Checks that compare results with the oracle, or with the same call under other conditions."""

    # ---- P1: finite or masked inputs never give a NaN

    @together("emptied")
    def test_empty_extents(self, impl: str, emptied: str) -> None:
        """With empty dimensions, results equal the oracle's, and gradients have the inputs' shapes and no NaN."""
        inputs = self.inputs(extents={**self.small, **dict.fromkeys(emptied, 0)})
        results, grads = self.results_and_gradients(lambda **given: self.call(impl, **given), inputs)
        for name, ours, right in zip(self.outputs, results, self.oracle(**inputs), strict=True):
            assert ours.shape == right.shape, f"{name} has shape {tuple(ours.shape)}, expected {tuple(right.shape)}"
            torch.testing.assert_close(ours, right.to(ours.dtype), rtol=1e-9, atol=1e-12)
        for name, grad in grads.items():
            assert grad.shape == inputs[name].shape and not grad.isnan().any(), name

    @together("hidden")
    def test_masks(self, impl: str, hidden: tuple[int, int]) -> None:
        """Various ranges of keys, or all keys, are masked. NaN and infinity under the mask reach no result and no
        gradient."""
        assert self.mask
        (start, stop), length = hidden, self.masked_length
        inputs = self.inputs(extents={self.masked: length, self.batch: 2})
        mask = torch.zeros(2, length, dtype=torch.bool, device=self.device)
        mask[0, start:stop] = True
        clean, spoilt = dict(inputs), dict(inputs)
        hides = [name for name in inputs if self.masked in self.arguments[name]]
        for name in hides:
            first, dim = self.axis_of(name, self.batch), self.axis_of(name, self.masked)
            under = mask if first == 0 else mask.any(0, keepdim=True)
            under = under.view([under.shape[0], *(length if i == dim else 1 for i in range(1, inputs[name].dim()))])
            odd = (
                torch.arange(length, device=self.device).view(
                    [length if i == dim else 1 for i in range(inputs[name].dim())]
                )
                % 2
                == 1
            )
            clean[name] = inputs[name].masked_fill(under, 0.0)
            spoilt[name] = clean[name].masked_fill(under & odd, torch.inf).masked_fill(under & ~odd, torch.nan)
        masked = {self.mask: mask}
        right, wanted = self.results_and_gradients(lambda **given: self.oracle(**given, **masked), clean)
        for dtype, tolerance in self.mask_tolerance.items():
            given = {name: t.to(dtype) for name, t in spoilt.items()}
            ours, grads = self.results_and_gradients(lambda **given: self.call(impl, **given, **masked), given)
            for name, mine, theirs in zip(self.outputs, ours, right, strict=True):
                self.check_result(name, mine, theirs, tolerance)
            for name, grad in grads.items():
                assert grad.isfinite().all(), f"the gradient of {name} is not finite"
                if name in hides:
                    under = grad[0].narrow(self.axis_of(name, self.masked) - 1, start, stop - start)
                    assert under.eq(0).all(), f"masked {name} has a gradient"
                size = max(float(wanted[name].abs().max()), 1.0)
                assert (grad - wanted[name]).abs().max() <= 1e3 * tolerance * size, f"the gradient of {name} is wrong"

    @together("argument", "poison")
    def test_a_bad_batch_element_stays_alone(self, impl: str, argument: str, poison: float) -> None:
        """A NaN or an infinity in one batch element of an argument changes no bit of the results of the other
        elements."""
        if self.axis_of(argument, self.batch) != 0:
            return
        inputs = self.inputs(torch.float32)
        clean = self.call(impl, **inputs)
        inputs[argument][1].view(-1)[0] = poison
        for ours, right in zip(self.call(impl, **inputs), clean, strict=True):
            others = [i for i in range(right.shape[0]) if i != 1]
            assert torch.equal(ours[others], right[others])

    # ---- P2: the error of every row is bounded

    def test_accuracy(self, impl: str, dtype: torch.dtype, law: str, shape: int) -> None:
        """Each row of results and gradients is within the bounds of P2 around the oracle in float64."""
        inputs = self.inputs(dtype, law, self.shapes[shape])
        self.check_accuracy(impl, dtype, law, inputs)

    def check_accuracy(self, impl: str, dtype: torch.dtype, law: str, inputs: Inputs) -> None:
        """Assert the bounds of P2 for these inputs."""
        wide = {name: t.double() for name, t in inputs.items()}
        low = self.torch_dtype(dtype)
        ratio = torch.finfo(dtype).eps / torch.finfo(low).eps
        cotangents = tuple(c.to(self.device, dtype) for c in self.incoming(self.oracle(**wide)))
        ours, grads = self.results_and_gradients(lambda **given: self.call(impl, **given), inputs, cotangents)
        right, wanted = self.results_and_gradients(self.oracle, wide, cotangents)
        theirs, own = self.results_and_gradients(
            self.in_torch, {name: t.to(low) for name, t in inputs.items()}, cotangents
        )
        score = self.score(wide)
        names = [(name, False) for name in self.outputs] + [(name, True) for name in self.graded]
        every = [(*r, *(g[name] for name in self.graded)) for r, g in ((ours, grads), (right, wanted), (theirs, own))]
        for (name, is_gradient), mine, correct, other in zip(names, *every, strict=True):
            assert not is_gradient or mine.dtype == dtype, f"the gradient of {name} is {mine.dtype}"
            if self.is_bounded(name, is_gradient, law):
                scaled = ratio * (other.double() - correct) + correct
                self.check_rows(Measured(name, is_gradient, mine, correct, scaled, dtype, score, wide, cotangents))

    @together("order_of_logits")
    def test_huge_logits(self, impl: str, dtype: torch.dtype, order_of_logits: str) -> None:
        """Logits from 2^20 to 2^60 in any order: results, and gradients of weighted values, are the oracle's; all
        gradients are finite.

        This check finds a kernel that compares a logit with a maximum kept in another unit, such as base 2.
        """
        tolerance = 8 * torch.finfo(dtype).eps
        for _ in range(3):
            inputs = self.huge_inputs(dtype, order_of_logits)
            ours, grads = self.results_and_gradients(lambda **given: self.call(impl, **given), inputs)
            right, wanted = self.results_and_gradients(self.oracle, {name: t.double() for name, t in inputs.items()})
            for name, mine, theirs in zip(self.outputs, ours, right, strict=True):
                self.check_result(name, mine, theirs, tolerance)
            for name, grad in grads.items():
                assert grad.isfinite().all(), f"the gradient of {name} is not finite"
                if not any(name in names for names in self.logits):
                    self.check_result(f"the gradient of {name}", grad, wanted[name], tolerance)

    def check_rows(self, found: Measured) -> None:
        """Assert that each row's error is within the bound of P2, which depends on the error of plain torch in that
        row."""
        ours, right, theirs = (
            t.double() if t.dim() else t.double()[None] for t in (found.ours, found.right, found.theirs)
        )
        what = f"the gradient of {found.name}" if found.is_gradient else found.name
        assert ours.shape == right.shape, f"{what} has shape {tuple(ours.shape)}, expected {tuple(right.shape)}"
        if right.numel() == 0:
            return
        # A right overflow.
        beyond = (right.abs() > torch.finfo(found.ours.dtype).max) & (ours == right.sign() * math.inf)
        ours, right, theirs = (t.masked_fill(beyond, 0.0) for t in (ours, right, theirs))
        size = self.row_sizes(found._replace(right=right)).clamp(min=1e-300)
        error, own = ((t - right).norm(dim=-1) / size for t in (ours, theirs))
        allowed = bound(found.dtype, found.score, self.torch_errors(own), 4.0 if found.is_gradient else 1.0)
        assert (error <= allowed).all(), f"{what}: {float((error / allowed).max()):.2f} of the error that it may have"

    # ---- P3: the same bits

    def test_same_bits(self, repeatable: str, bit_dtype: torch.dtype, bit_shape: int) -> None:
        """The bits are the same for 1, 2, 4 and 8 threads, and for each batch element alone."""
        inputs = self.bit_inputs(bit_dtype, bit_shape)
        before = torch.get_num_threads()
        try:
            whole = self.run(repeatable, inputs)
            for count in (1, 2, 4, 8):
                torch.set_num_threads(count)
                assert same_bits(self.run(repeatable, inputs), whole), f"{count} threads give other bits"
        finally:
            torch.set_num_threads(before)
        results = len(whole) - len(self.graded)
        for i in range({**self.extents, **(self.bits[bit_shape] if self.bits else {})}[self.batch]):
            alone = self.run(
                repeatable, {name: t[i : i + 1] if self._is_batched(name) else t for name, t in inputs.items()}
            )
            batched = [True] * results + [self._is_batched(name) for name in self.graded]
            for one, all_of_them, cut in zip(alone, whole, batched, strict=True):
                assert not cut or same_bits((one,), (all_of_them[i : i + 1],)), (
                    f"batch element {i} has other bits when it is computed alone"
                )

    def bit_inputs(self, dtype: torch.dtype, shape: int) -> Inputs:
        """Return the inputs whose bits are compared, with a mask if the operator has one."""
        extents = {**self.extents, **(self.bits[shape] if self.bits else {})}
        inputs = self.inputs(dtype, extents=extents)
        if not self.mask:
            return inputs
        return {**inputs, self.mask: torch.rand(extents[self.batch], extents[self.masked]).to(self.device) < 0.1}

    def _is_batched(self, name: str) -> bool:
        return name == self.mask or self.axis_of(name, self.batch) == 0

    def test_same_bits_on_every_run(self, repeatable: str) -> None:
        inputs = self.inputs(torch.float32)
        first = self.run(repeatable, inputs)
        for _ in range(self.repeats):
            assert same_bits(self.run(repeatable, inputs), first)

    def test_arguments_are_not_changed(self, impl: str) -> None:
        inputs = self.inputs(torch.float32)
        before = {name: t.clone() for name, t in inputs.items()}
        with torch.no_grad():
            self.call(impl, **inputs)
        self.run(impl, inputs)
        assert all(torch.equal(t, before[name]) for name, t in inputs.items())

    # ---- P5: any layout

    def _close(self, ours: Results, right: Results, dtype: torch.dtype) -> None:
        tolerance = self.layout_tolerance.get(dtype, 1e-2)
        size = max((float(b.nan_to_num(0, 0, 0).abs().max()) for b in right if b.numel()), default=0.0)
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)

    @together("layout")
    def test_layouts(self, impl: str, dtype: torch.dtype, layout: str) -> None:
        """Results and gradients do not depend on the strides and offsets of the arguments and of the incoming
        gradients."""
        inputs = self.inputs(dtype)
        plain = self.call(impl, **inputs)
        along = tuple(torch.randn(r.shape).to(r) for r in plain)
        moved = {name: LAYOUTS[layout](t) if t.dim() else t for name, t in inputs.items()}
        odd = tuple(LAYOUTS[layout](c) if c.dim() else c for c in along)
        self._close(self.run(impl, moved, odd), self.run(impl, inputs, along), dtype)

    @together("expanded")
    def test_expanded_arguments(self, impl: str, expanded: str) -> None:
        """Expanded arguments (stride 0) and incoming gradients whose strides are all 0 give the same as contiguous
        copies."""
        inputs = self.inputs()
        spread, copied = dict(inputs), dict(inputs)
        for name in inputs:
            dim = self.axis_of(name, expanded)
            if dim >= 0 and self.arguments[name].count(expanded) == 1:
                spread[name] = inputs[name].narrow(dim, 0, 1).expand(inputs[name].shape)
                copied[name] = spread[name].contiguous()
        leaves = self.leaves(spread)
        results = tuple(self.call(impl, **leaves))
        finite = [r.masked_fill(r.isinf(), 0.0).sum() for r in results if r.requires_grad]
        grads = torch.autograd.grad(finite, [leaves[name] for name in self.graded], allow_unused=True)
        kept = tuple(torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(self.graded, grads, strict=True))
        self._close((*(r.detach() for r in results), *kept), self.run(impl, copied), torch.float64)

    @together("argument")
    def test_a_lazy_negation_is_seen(self, impl: str, argument: str) -> None:
        """An argument whose memory holds its negative, such as `x.conj().imag`, gives the same as its contiguous
        copy."""
        inputs = self.inputs(torch.float32)
        lazy = {**inputs, argument: lazily_negated(inputs[argument])}
        with torch.no_grad():
            self._close(tuple(self.call(impl, **lazy)), tuple(self.call(impl, **inputs)), torch.float32)
        self._close(self.run(impl, lazy), self.run(impl, inputs), torch.float32)

    def test_more_than_65535_matrices(self, impl: str, many_matrices: bool) -> None:
        assert many_matrices and self.many
        inputs = self.inputs(torch.float32, extents=self.many)
        right = self.oracle(**{name: t.double() for name, t in inputs.items()})
        for name, ours, correct in zip(self.outputs, self.call(impl, **inputs), right, strict=True):
            assert (ours.double() - correct).abs().max() < 1e-4, name
