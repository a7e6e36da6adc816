"""The result of `replace_modules`: how many modules it replaced, and which code each new module runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ..parts import one_like

if TYPE_CHECKING:
    from typing import Self

_HEADING = ("module", "is now a", "in training", "in evaluation")
_NONE = """0 modules replaced: the model has none of these types (subclasses are left alone).
A model with its own attention class can call cmab_kernels.integrations.scaled_dot_product_attention."""
_ATTENTIONS = ("MultiheadAttention", "ContinualAttention")
_LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
_CALLS = """MultiheadAttention and the transformer layers still run torch's code for some calls: with an attention mask
(also a causal one), with a key padding mask of values other than 0 and -inf, or with need_weights=True, torch's
default. cmab_kernels.explain(model, *inputs) makes a call and says for each module which code ran."""


class Replacement(NamedTuple):
    """A module that was replaced: its path in the model, its new class, and why it runs torch's own code.

    `training` and `evaluation` give the reason in each mode, or None if the module runs the operators.
    """

    module: str
    kind: str
    training: str | None
    evaluation: str | None

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Self:
        """Return the entry for a module of this package at `path`."""
        return cls(path, type(module).__name__, _why_torch(module, training=True), _why_torch(module, training=False))


class Replacements(int):
    """The number of modules replaced, as an `int`. Its `str` is a table of the calls that are fused or go to torch.

    `modules` is the table, with a `Replacement` for each module. Its `training` and `evaluation` are None where the
    module is fused, else the reason why torch's code runs.

    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 3)
    >>> ours = {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention}
    >>> replaced = cmab_kernels.nn.replace_modules(model, ours, verbose=False)
    >>> replaced
    3
    >>> print("\\n".join(str(replaced).splitlines()[:3]))
    3 modules replaced
    module              is now a            in training             in evaluation
    layers.0.self_attn  MultiheadAttention  torch's: dropout is on  fused if need_weights=False, no mask
    """

    modules: tuple[Replacement, ...]
    need_weights: bool
    """Whether the new attentions return weights in calls that do not give `need_weights`."""

    def __new__(cls, modules: Iterable[Replacement], need_weights: bool = True) -> Self:
        rows = tuple(modules)
        made = super().__new__(cls, len(rows))
        made.modules, made.need_weights = rows, need_weights
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:  # copies and pickles keep the table
        return self.modules, self.need_weights

    def __str__(self) -> str:
        if not self.modules:
            return _NONE
        rows = [_HEADING]
        for at, kind, training, evaluation in self.modules:
            rows.append((at, kind, self._verdict(kind, training), self._verdict(kind, evaluation)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{int(self)} {'module' if self == 1 else 'modules'} replaced", *lines, _CALLS])

    def _verdict(self, kind: str, why: str | None) -> str:
        """Return a cell of the table. It names the condition for fused calls, since some may still go to torch."""
        if why is not None:
            return f"torch's: {why}"
        if kind not in _ATTENTIONS + _LAYERS:
            return "fused"
        return f"fused if {'need_weights=False, ' * (kind in _ATTENTIONS and self.need_weights)}no mask"


def _why_torch(module: Any, *, training: bool) -> str | None:
    """Return why torch's own code runs for a plain call of a module, in training mode or in eval mode.

    All modules that `replace_modules` makes have `why_torch`.
    """
    why_torch = module.why_torch
    attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    options = {"need_weights": False} if module is attention else {}
    row = one_like(attention, "in_proj_weight", "q_proj_weight").new_empty(1, 1, attention.embed_dim)
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        rows = 3 if module is attention else 2 if isinstance(module, nn.TransformerDecoderLayer) else 1
        why: str | None = why_torch(*[row] * rows, **options)
        return why
    finally:
        for part, mode in before:
            part.training = mode
