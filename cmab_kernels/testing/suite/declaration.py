"""The declaration of an operator for the test suite, and the inputs, calls and gradients that the checks build from
it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..bounds import LAWS, row_error
from ..interpreter import INTERPRETING
from ..layouts import LAYOUTS

Inputs = dict[str, Tensor]
Results = tuple[Tensor, ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Measured(NamedTuple):
    """A result or a gradient of the operator (`ours`), of the oracle (`right`) and of torch (`theirs`), with the data
    of its bound."""

    name: str
    """The name of the result, or of the argument whose gradient this is."""
    is_gradient: bool
    ours: Tensor
    right: Tensor
    theirs: Tensor
    dtype: torch.dtype
    """The dtype of the inputs."""
    score: float
    """The largest absolute logit."""
    inputs: Inputs
    """The inputs in float64."""
    cotangents: Results
    """The incoming gradients of the results."""


def label(value: Any) -> str:
    """Return the text of a parameter's value in the name of a test."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.") or "none"


def together(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let one test run a check for all values of these parameters; its error lists each case that fails.

    Each test takes some milliseconds besides its check, so several cases of a millisecond share one
    test. A call that gives every parameter, such as that of `failures`, runs one case.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check)

        @functools.wraps(check)
        def run(self: Any, *given: Any, **chosen: Any) -> None:
            if len(given) + len(chosen) == len(signature.parameters) - 1:
                check(self, *given, **chosen)
                return
            found: dict[str, Exception] = {}
            values = self.parameters()
            for case in itertools.product(*(values[name] for name in names)):
                self.teardown_method()
                self.setup_method()
                try:
                    check(self, *given, **chosen, **dict(zip(names, case, strict=True)))
                except Exception as error:
                    found["-".join(map(label, case))] = error
            if found:
                told = "\n".join(f"[{case}] {type(error).__name__}: {error}" for case, error in found.items())
                raise AssertionError(f"{len(found)} cases fail:\n{told}") from next(iter(found.values()))

        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # read by pytest
        return run

    return decorate


def _along_the_first_column(sizes: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of `like` (..., rows, D) with `sizes` in its first column and 0 in the
    others."""
    made = torch.zeros_like(like)
    made[..., 0] = sizes
    return made


class Declaration:
    """The declaration of an operator: its arguments, its oracle, and its promises.

    Tensor shapes are words with a letter for each dimension: "BHND" is (B, H, N, D). `extents` gives each letter a
    length. Dimensions with the same letter have the same length, so the checks can take one batch element, empty a
    dimension, or mask keys.
    """

    operator: ClassVar[str] = ""
    """The name of the operator, for messages."""
    arguments: ClassVar[Mapping[str, str]] = {}
    """argument -> its dimensions, one letter each; an argument without letters is a scalar"""
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    """The names of the results of `call`, in order."""
    extents: ClassVar[Mapping[str, int]] = {}
    """letter -> its usual length"""
    small: ClassVar[Mapping[str, int]] = {}
    """letter -> its length in checks with numerical derivatives"""
    shapes: ClassVar[Sequence[Mapping[str, int]]] = ({},)
    """The lengths of the accuracy checks, each as changes of `extents`."""
    differentiable: ClassVar[tuple[str, ...] | None] = None
    """The arguments that have gradients; None: all of them."""
    impls: ClassVar[tuple[str, ...]] = ("reference",)
    """The implementations to test."""
    repeatable: ClassVar[tuple[str, ...]] = ()
    """The implementations that promise the same bits on every run, for any number of threads, alone or in a batch."""
    definition: ClassVar[str] = "reference"
    """The implementation with which derivatives up to the third order are compared."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES
    laws: ClassVar[Sequence[str]] = tuple(LAWS)
    """The names of the distributions of inputs in the accuracy checks."""
    batch: ClassVar[str] = "B"
    """The letter of the batch dimension; "" if there is none."""
    logits: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ())
    """The arguments (..., rows, D) whose products are the operator's logits: any of the first group with any of the
    second. Empty: not checked."""
    empty: ClassVar[str] = ""
    """The letters of dimensions that may be empty."""
    mask: ClassVar[str | None] = None
    """The name of a bool argument (B, `masked`), True = ignore; None if there is none."""
    masked: ClassVar[str] = "N"
    """The letter of the masked dimension."""
    masked_length: ClassVar[int] = 200
    """The length of that dimension in the checks of masks, at least 128."""
    mask_tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float64: 1e-12, torch.float32: 4e-6}
    """dtype -> the relative error allowed for a row of a result with masked keys; gradients may have a thousand times
    as much"""
    layout_tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float64: 1e-12, torch.float32: 4e-6}
    """dtype -> the relative difference allowed between layouts; 1e-2 for dtypes that are not listed"""
    gradient_tolerance: ClassVar[float] = 1e-9
    """The relative difference allowed in float64 for compiled or vmapped results and gradients, and for higher
    derivatives."""
    bits: ClassVar[Sequence[Mapping[str, int]]] = ()
    """The lengths for the checks of equal bits, each as changes of `extents`. Empty: `extents` alone."""
    repeats: ClassVar[int] = 100
    """The number of runs that must give the same bits."""
    many: ClassVar[Mapping[str, int] | None] = None
    """Lengths that make more than 65,535 matrices (a CUDA grid's limit); None: not checked."""
    compilers: ClassVar[tuple[str, ...]] = ("aot_eager",)
    """The backends of torch.compile."""
    autocast: ClassVar[tuple[str, ...]] = ()
    """The arguments that are cast under autocast; none: not checked."""
    ungraded: ClassVar[bool] = False
    """Whether a call without gradients takes another path than a call with gradients. Then results are taken from such
    a call, and gradients from a call with gradients."""
    batched_gradcheck: ClassVar[bool] = True
    """Whether gradcheck also takes batched gradients."""
    forward_mode: ClassVar[bool] = True
    """Whether the operator has derivatives in forward mode; if so, they are checked."""
    accepted: ClassVar[tuple[str, ...]] = ()
    """The names of error checks that are not run, because the operator accepts the argument, such as "value of another
    dtype"."""

    gpu: ClassVar[bool] = False
    """Whether the checks run on a GPU, for the implementations there. Set it on `OperatorSuite` before suites are
    declared."""
    on_gpu: ClassVar[Mapping[str, Any]] = {}
    """attribute -> its value if `gpu` is set, such as more `shapes`; subclasses do not inherit it"""
    captured: ClassVar[bool] = True
    """Whether a call on a GPU does not wait for the device, so that a CUDA graph can capture it."""

    # ---- what a declaration must define

    def call(self, impl: str, **inputs: Any) -> Sequence[Tensor]:
        """Call the operator's public function with this implementation and return its floating-point results."""
        raise NotImplementedError

    def oracle(self, **inputs: Any) -> Sequence[Tensor]:
        """Return the right results, computed by the formula and differentiable. The inputs are float64."""
        raise NotImplementedError

    # ---- what a declaration may override

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        """Return a random argument for the checks, float32 or wider. Override this for arguments with restrictions, for
        example that they must be positive or symmetric."""
        return LAWS[law](*shape)

    def in_torch(self, **inputs: Any) -> Sequence[Tensor]:
        """Return the results of plain torch in the dtype of the inputs. The bounds of P2 are multiples of the errors of
        these results."""
        return self.oracle(**inputs)

    def incoming(self, results: Sequence[Tensor]) -> Results:
        """Return the incoming gradients of the results in the accuracy checks; zeros for a result that `in_torch` does
        not have."""
        return tuple(torch.randn(r.shape) for r in results)

    def torch_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which `in_torch` runs for results of `dtype`. Its error is then scaled by the ratio of
        the two eps."""
        return dtype

    def score(self, inputs: Inputs) -> float:
        """Return the largest absolute logit; 0 if there are no logits."""
        return 0.0

    def row_sizes(self, found: Measured) -> Tensor:
        """Return the number by which each row's error is divided.

        By default this is the norm of the right row. For a gradient it is at least a twentieth of the largest norm in
        the matrix.
        """
        size = found.right.norm(dim=-1)
        return size.maximum(0.05 * size.amax(-1, keepdim=True)) if found.is_gradient and size.dim() else size

    def torch_errors(self, error: Tensor) -> Tensor:
        """Return the error of plain torch to use in the bound of each row. Override this if all rows of a matrix share
        one error."""
        return error

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Return whether P2 bounds a result, or the gradient of an argument, for inputs of this distribution."""
        return True

    def check_result(self, name: str, ours: Tensor, right: Tensor, allowed: float) -> None:
        """Assert that each row's relative error is at most `allowed`. If the right row is 0, the result must be exactly
        0."""
        assert ours.shape == right.shape, f"{name} has shape {tuple(ours.shape)}, expected {tuple(right.shape)}"
        infinite = right.isinf() & (ours == right)
        ours, right = (t.masked_fill(infinite, 0.0) for t in (ours.double(), right.double()))
        error = row_error(ours, right) if right.dim() else ((ours - right) / right).abs()
        assert (error <= allowed).all(), f"{name}: error {float(error.max()):.1e}, and {allowed:.1e} is allowed"

    # ---- what the checks build from it

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the checks. For Triton's interpreter it is the CPU."""
        return torch.device("cuda" if self.gpu and not INTERPRETING else "cpu")

    def inputs(
        self, dtype: torch.dtype = torch.float64, law: str = "normal", extents: Mapping[str, int] | None = None
    ) -> Inputs:
        """Return random arguments of the usual extents, changed by `extents`."""
        sizes = {**self.extents, **(extents or {})}
        shapes = {name: tuple(sizes[a] for a in axes) for name, axes in self.arguments.items()}
        return {name: self.make(name, shape, law).to(self.device, dtype) for name, shape in shapes.items()}

    def small_inputs(self) -> Inputs:
        """Return float64 arguments for numerical derivatives."""
        return self.inputs(extents=self.small)

    def huge_inputs(self, dtype: torch.dtype, order: str, extents: Mapping[str, int] | None = None) -> Inputs:
        """Return arguments whose logits are 2^20 to 2^60 times D^-0.5, of both signs, or less if
        `dtype` cannot hold their factors.

        `order` is the order of the logits of successive keys: "rising", "falling" or "mixed". The logits are so far
        apart that a softmax over them has only one weight that is not 0.
        """
        inputs = self.inputs(dtype, extents=extents)
        lefts, rights = self.logits
        most = 14 if dtype == torch.float16 else 40
        for name in lefts:
            sizes = 2.0 ** (most // 2) * torch.tensor([1.0, 1.5])[torch.randint(2, inputs[name].shape[:-1])]
            sizes[..., 1::2, :] *= -1  # every other head
            inputs[name] = _along_the_first_column(sizes, inputs[name])
        for i, name in enumerate(rights):
            rows = inputs[name].shape[-2]
            sizes = (
                (2.0 ** torch.linspace(0, most, rows)).bfloat16().float()
                * 2.0**-i
                * torch.tensor([1.0, 1.0, -1.0])[torch.arange(rows) % 3]
            )
            mixed = torch.rand(inputs[name].shape[:-1]).argsort(-1)
            places = {"rising": torch.arange(rows), "falling": torch.arange(rows).flip(0), "mixed": mixed}[order]
            inputs[name] = _along_the_first_column(sizes[places], inputs[name])
        return inputs

    @property
    def graded(self) -> tuple[str, ...]:
        """Return the names of the arguments that have gradients."""
        return tuple(self.arguments) if self.differentiable is None else self.differentiable

    def leaves(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs, with differentiable ones replaced by leaf tensors that require gradients."""
        return {name: t.detach().requires_grad_() if name in self.graded else t for name, t in inputs.items()}

    def function_of(
        self, impl: str, inputs: Inputs, names: Sequence[str] | None = None
    ) -> tuple[Callable[..., Results], Results]:
        """Return the call as a function of the named arguments (None: all differentiable ones) by position, and the
        values of these arguments."""
        chosen = self.graded if names is None else tuple(names)

        def function(*tensors: Tensor) -> Results:
            return tuple(self.call(impl, **{**inputs, **dict(zip(chosen, tensors, strict=True))}))

        return function, tuple(inputs[name] for name in chosen)

    def results_and_gradients(
        self, function: Callable[..., Sequence[Tensor]], inputs: Mapping[str, Tensor], cotangents: Results | None = None
    ) -> tuple[Results, Inputs]:
        """Return the results of `function(**inputs)`, and its gradients by name for incoming gradients `cotangents`
        (None: ones)."""
        leaves = self.leaves(inputs)
        results = tuple(function(**leaves))
        graded = [leaves[name] for name in self.graded]
        along = (
            [torch.ones_like(r) for r in results]
            if cotangents is None
            else [c.to(r.dtype) for c, r in zip(cotangents, results, strict=True)]
        )
        if self.ungraded:
            with torch.no_grad():
                results_alone = tuple(function(**inputs))
        else:
            results_alone = tuple(r.detach() for r in results)
        pairs = [(r, c) for r, c in zip(results, along, strict=True) if r.requires_grad]
        if not pairs:  # no result requires a gradient, for example because a dimension is empty
            return results_alone, {name: torch.zeros_like(leaves[name]) for name in self.graded}
        grads = torch.autograd.grad([r for r, _ in pairs], graded, [c for _, c in pairs], allow_unused=True)
        kept = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(self.graded, grads, strict=True)}
        return results_alone, kept

    def run(self, impl: str, inputs: Mapping[str, Tensor], cotangents: Results | None = None) -> tuple[Tensor, ...]:
        """Return the results of the call followed by its gradients."""
        results, grads = self.results_and_gradients(lambda **given: self.call(impl, **given), inputs, cotangents)
        return (*results, *grads.values())

    def axis_of(self, name: str, letter: str) -> int:
        """Return the index of an argument's first dimension with this letter, or -1 if it has none."""
        return self.arguments[name].find(letter)

    # ---- the parameters of the checks, by name

    def parameters(self) -> dict[str, Sequence[Any]]:
        """Return the values of each parameter of the checks, by the name that the parameter has in their signatures."""
        letters = "".join(dict.fromkeys("".join(self.arguments.values())))
        n = self.masked_length
        outer = [letter for letter in letters if letter in self.empty]
        return {
            "impl": self.impls,
            "optimised": [impl for impl in self.impls if impl != self.definition],
            "repeatable": self.repeatable,
            "dtype": self.dtypes,
            "law": self.laws,
            "shape": range(len(self.shapes)),
            "layout": list(LAYOUTS),
            "argument": list(self.graded),
            "expanded": [letter for letter in letters[:2] if self.arguments and letter in self.extents],
            "emptied": ["".join(x for i, x in enumerate(outer) if bits >> i & 1) for bits in range(2 ** len(outer))]
            if outer
            else [],
            "hidden": [(0, 64), (64, 128), (128, n), (0, n), (3, n - 3), (0, n - 1), (1, n)] if self.mask else [],
            "poison": [torch.nan, torch.inf] if self.batch else [],
            "bit_shape": range(max(len(self.bits), 1)) if self.batch else [],
            "bit_dtype": [d for d in self.dtypes if self.gpu or d in (torch.float32, torch.bfloat16)],
            "many_matrices": [True] if self.many else [],
            "compiled": [
                (impl, c) for impl in self.impls for c in self.compilers[: 1 if impl == self.definition else None]
            ],
            "dynamic": [False, True],
            "order_of_logits": ["rising", "falling", "mixed"] if any(self.logits) else [],
            "mapped": ["all", *(["some"] if len(self.graded) > 1 else [])],
            "cast": [True] if self.autocast else [],
            "forward_mode_of": list(self.graded[:1]) if self.forward_mode else [],
            "outer": ["forward", "reverse"] if self.forward_mode else [],
            "order": [1, 2, 3],
            "subset": self._subsets(),
            "bad": self.bad_arguments(),
            "streamed": self.repeatable if self.device.type == "cuda" and self.captured else (),
        }

    def _subsets(self) -> list[tuple[str, ...]]:
        names = self.graded
        return (
            [(name,) for name in names] + ([(names[0], names[-1])] if len(names) > 2 else []) if len(names) > 1 else []
        )

    def bad_arguments(self) -> list[str]:
        """Return the names of the error checks; `errors.Errors` overrides this."""
        return []
