"""Adapters for our continual modules in the containers of the package continual-inference.

Its `continual.Residual` runs their steps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn import (
    CircularPositionalEncoding,
    ContinualAttention,
    ContinualEncoder,
    ContinualEncoderLayer,
    ContinualNystromAttention,
)
from ..nn.stream import with_own_streams
from ..runtime.checks import mismatch

try:
    import continual
except ImportError as error:
    needed = "pip install continual-inference"
    raise ImportError(f"cmab_kernels.integrations.continual needs the package continual-inference: {needed}") from error


class Adapted(continual.CoModule, nn.Module):  # type: ignore[misc]  # the package has no types
    """One of our modules as a module of continual-inference, in the layout of its containers: (B, C, T), and (B, C) for
    a step.

    `module` must be `batch_first` and have single outputs. `forward` returns the outputs of all full windows of T
    tokens, as `forward_steps` of a new stream does, and supports gradients.
    """

    __copy__ = with_own_streams
    _state_shape = 0
    _dynamic_state_inds: list[bool] = []  # noqa: RUF012  # the base class declares it so

    def __init__(self, module: Any) -> None:
        super().__init__()
        last: Any = getattr(
            module, "self_attn", module.layers[-1].self_attn if isinstance(module, ContinualEncoder) else module
        )
        output = getattr(last, "output", "single")
        if not last.batch_first or output != "single":
            given = f"one with batch_first={last.batch_first} and output={output!r}"
            raise ValueError(
                mismatch(
                    "module",
                    given,
                    "batch_first=True and output='single', because containers of continual-inference need these",
                )
            )
        self.module = module
        self.receptive_field = _receptive_field(module)

    delay = 0  # each output belongs to the newest token

    @staticmethod
    def build_from(module: nn.Module) -> Adapted:
        """Make an adapter for a module; `continual.Sequential` calls this."""
        return Adapted(module)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs (B, C, T') of tokens (B, C, T). The stream does not change."""
        run = getattr(self.module, "forward_stream", self.module)
        out = run(input.mT)
        if out is None:
            raise ValueError(
                mismatch("input", f"{input.shape[2]} tokens", f"at least a window of {self.receptive_field}")
            )
        return out.mT

    def forward_step(self, input: Tensor, update_state: bool = True) -> Tensor | None:
        """Take one more token (B, C); return its output (B, C), or None before the window is full."""
        return self.module.forward_step(input, update_state=update_state)

    def _forward_step(self, input: Tensor, prev_state: Any = None) -> tuple[Tensor | None, Any]:
        """Take one more token (B, C) after a state that the caller keeps; return (output, state)."""
        result: tuple[Tensor | None, Any] = self.module._forward_step(input, prev_state=prev_state)
        return result

    def forward_steps(self, input: Tensor, pad_end: bool = False, update_state: bool = True) -> Tensor | None:
        """Take tokens (B, C, T); return their outputs (B, C, T'), or None. There is no padding, so `pad_end` has no
        effect."""
        out = self.module.forward_steps(input.mT, update_state=update_state)
        return None if out is None else out.mT

    def get_state(self) -> Any:
        """Return the state of the module."""
        return self.module.get_state()

    def set_state(self, state: Any) -> None:
        """Continue from a state that `get_state` returned."""
        self.module.set_state(state)

    def clean_state(self) -> None:
        """Forget all tokens."""
        self.module.clean_state()


def register() -> None:
    """Let containers of the package continual-inference take our modules, each in an adapter. Calling this again has no
    effect.

    The modules are `ContinualAttention`, `ContinualNystromAttention`, `ContinualEncoderLayer`, `ContinualEncoder` and
    `CircularPositionalEncoding`, with `batch_first=True` and single outputs. Containers pass (B, C, T) from module to
    module.

    >>> import continual, cmab_kernels.integrations.continual
    >>> cmab_kernels.integrations.continual.register()
    >>> from cmab_kernels.nn import CircularPositionalEncoding, ContinualEncoderLayer
    >>> positions = CircularPositionalEncoding(16, 8, batch_first=True)
    >>> layer = ContinualEncoderLayer(16, 2, 32, batch_first=True, sequence_len=8, num_landmarks=4)
    >>> model = continual.Sequential(positions, layer, continual.Linear(16, 3, channel_dim=1)).eval()
    >>> with torch.no_grad():
    ...     model.forward_steps(torch.randn(1, 16, 20)).shape
    torch.Size([1, 3, 13])
    """
    for kind in (
        CircularPositionalEncoding,
        ContinualAttention,
        ContinualEncoder,
        ContinualEncoderLayer,
        ContinualNystromAttention,
    ):
        continual.convert.register(kind, Adapted)
        # Residual, Parallel and BroadcastReduce read these attributes of a module before they convert it.
        for name, given in {
            "delay": 0,
            "padding": 0,
            "stride": 1,
            "receptive_field": property(_receptive_field),
        }.items():
            setattr(kind, name, given)


def _receptive_field(module: Any) -> int:
    """Return the number of tokens on which an output of one of our modules depends."""
    return 1 if isinstance(module, CircularPositionalEncoding) else int(module.sequence_len)
