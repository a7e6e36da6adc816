"""Stacked blocks under the suite that every operator inherits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.layers import block_stack
from cmab_kernels.testing import OperatorSuite, oracles

from ..test_suite import LayerSuite, Results, normed

HEADS = 2
NORMS = 10


def parameters(latents: Any, vectors: Any, squares: Any, expand: Any, expand_bias: Any, contract: Any) -> list[Tensor]:
    """Return the parameters of one block in order, from those of equal shapes together."""
    scales, shifts, biases = iter(vectors[:NORMS]), iter(vectors[NORMS : 2 * NORMS]), iter(vectors[2 * NORMS :])
    matrices, networks = iter(squares), zip(expand, expand_bias, contract, strict=True)

    def norms(count: int) -> Iterator[Tensor]:
        return (next(each) for _ in range(count) for each in (scales, shifts))

    made = [latents]
    for _ in range(2):
        for count in (2, 1):
            made += [*norms(count), *islice(matrices, 4), next(biases)]
            made += [*norms(1), *next(networks), next(biases)]
    return made


class TestBlockStack(LayerSuite):
    """Two blocks that read inputs; the parameters of the second are half those of the first."""

    operator = "block_stack"
    arguments = {
        "x": "BLC",
        "inputs": "BNC",
        "latents": "MC",
        "vectors": "VC",
        "squares": "SCC",
        "expand": "PGC",
        "expand_bias": "QG",
        "contract": "RCF",
    }
    extents = {
        **{"B": 2, "L": 5, "N": 37, "C": 8, "M": 6, "F": 6, "G": 12},
        **{"V": 28, "S": 16, "P": 4, "Q": 4, "R": 4},  # how many of each a block has
    }
    small = {"L": 2, "N": 3, "C": 4, "M": 2, "F": 2, "G": 4}
    shapes = ({}, {"L": 33, "N": 130, "C": 16, "M": 17, "F": 24, "G": 48}, {"B": 3, "L": 7, "N": 3, "M": 11})
    laws = ("normal",)
    empty = "N"
    mask = "key_padding_mask"
    bits = ({"B": 3, "L": 65, "N": 300, "C": 16, "M": 9}, {"B": 5, "L": 7, "N": 50})
    accepted = ("vectors of a dimension too few", "squares of a dimension too few")  # there are no parameters then
    compilers = ("eager", "aot_eager")
    residual, all_blocks = "input", False

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        if name != "vectors":
            return super().make("weight" if len(shape) == 3 and name not in ("x", "inputs") else name, shape, law)
        made = 0.5 * torch.randn(shape)
        made[:NORMS] = 1 + 0.4 * made[:NORMS]
        return made

    def torch_errors(self, error: Tensor) -> Tensor:
        """Return the largest error: a row goes through sixteen layers, and each layer mixes all rows of a set."""
        return error.amax(-1, keepdim=True)

    def test_gradgradcheck(self, impl: str) -> None:
        """The check runs in fast mode, along random directions, because a block has hundreds of numbers."""
        assert torch.autograd.gradgradcheck(*self._graded_call(impl), fast_mode=True)

    def call(self, impl: str, x: Any, inputs: Any, key_padding_mask: Any = None, **given: Any) -> Results:
        return self.stack(impl, x, inputs, parameters(**given), key_padding_mask=key_padding_mask)

    def stack(self, impl: str, x: Any, inputs: Any, block: list[Tensor], **options: Any) -> Results:
        both = [*block, *(0.5 * each if isinstance(each, Tensor) else each for each in block)]
        settings = {"num_heads": HEADS, "residual": self.residual, "all_blocks": self.all_blocks, "impl": impl}
        y = block_stack(x, inputs, both, **options, **settings)
        return (y.transpose(0, 1) if self.all_blocks else y,)

    def oracle(
        self, x: Any, inputs: Any = None, key_padding_mask: Any = None, attended: Any = None, **given: Any
    ) -> Any:
        block, after = parameters(**given), []
        for k, given_block in enumerate((block, [0.5 * each for each in block])):
            own = iter(given_block)
            rows = next(own).expand(len(x), -1, -1)
            m = self.attend(rows, own, inputs, key_padding_mask, None if attended is None else attended[:, k])
            m = self.forward(self.attend(self.forward(m, own), own), own)
            x = self.forward(self.attend(self.forward(self.attend(x, own, m), own), own), own)
            after.append(x)
        return (torch.stack(after, 1) if self.all_blocks else x,)

    def forward(self, rows: Tensor, own: Iterator[Tensor]) -> Tensor:
        norm, expand, contract = (list(islice(own, 2)) for _ in range(3))
        seen = normed(rows, *norm)
        features, gate = F.linear(seen, *expand).chunk(2, -1)
        return (seen if self.residual == "normed" else rows) + F.linear(features * F.gelu(gate), *contract)

    def attend(
        self, rows: Tensor, own: Iterator[Tensor], context: Any = None, ignore: Any = None, out: Any = None
    ) -> Tensor:
        seen = read = normed(rows, *islice(own, 2))
        if context is not None:
            context = context if ignore is None else context.masked_fill(ignore[..., None], 0.0)
            read = normed(context, *islice(own, 2))
        elif out is not None:
            list(islice(own, 2))
        weights: Sequence[Tensor] = list(islice(own, 3))
        if out is None:
            projected = [F.linear(each, weight) for each, weight in zip((seen, read, read), weights, strict=True)]
            heads = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in projected]
            out = oracles.attention(*heads, ignore)[0].to(rows.dtype)
        added = F.linear(out.transpose(1, 2).flatten(-2), *islice(own, 2))
        return (seen if self.residual == "normed" else rows) + added


class TestGivenReading(TestBlockStack):
    """The latents after each block. The blocks get the results of their first attentions, and their layers add to
    norm(x)."""

    arguments = {"x": "BLC", "attended": "BKHMD", **dict(list(TestBlockStack.arguments.items())[2:])}
    residual, all_blocks = "normed", True
    extents = {**TestBlockStack.extents, "K": 2, "H": HEADS, "D": 4}
    small = {**TestBlockStack.small, "D": 2}
    shapes = ({}, {"L": 33, "M": 17, "F": 24, "G": 48})
    empty, mask = "", None
    bits = ({"B": 3, "L": 65, "M": 9},)
    accepted = (*TestBlockStack.accepted, "attended that is a list", "attended of a dimension too few")

    def test_autocast(self, impl: str, cast: bool) -> None:
        """All arguments are cast except `attended`, which stays in the dtype of sums."""
        self.autocast = tuple(name for name in self.arguments if name != "attended")
        OperatorSuite.test_autocast(self, impl, cast)

    def call(self, impl: str, x: Any, attended: Any, **given: Any) -> Results:  # type: ignore[override]  # other arguments
        of_all = attended.transpose(0, 1).flatten(0, 1)
        wide = of_all.float() if of_all.dtype in (torch.bfloat16, torch.float16) else of_all
        return self.stack(impl, x, None, parameters(**given), attended=wide)
