"""Modules of family A, projections and all: the drop-in `nn.MultiheadAttention`, and a CMAB that takes in one more point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMAB, MultiheadAttention

from ..floors import BYTES, Work, attention_work
from ..harness import Case, device, generator, lacking_memory, normal
from .attention import SDPA, exact
from .operators import Implementation, OperatorCase, direction

TORCH = "nn.MultiheadAttention"
OURS = "cmab_kernels.nn.MultiheadAttention"


class ModuleInputs(NamedTuple):
    latents: Tensor
    context: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class Module(OperatorCase):
    """The whole of nn.MultiheadAttention of `latents` over a context; backward to parameters and inputs."""

    heads: int = 4
    width: int = 64
    keys: int = 100_000
    latents: int = 128
    backward: bool = False
    threads: int | None = field(default=None, kw_only=True)

    scan = "nn.MultiheadAttention"
    baselines = (TORCH,)

    def __str__(self) -> str:
        way = "-forward+backward" if self.backward else ""
        return f"module{way}-float32-{self.heads}-heads-C{self.width}-L{self.latents}-N{self.keys}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": direction(self.backward), "H": self.heads, "L": self.latents, "N": self.keys, "C": self.width}

    @property
    def work(self) -> Work:
        """The context is read and projected to keys and values once; backward, gradients to its weights and to itself."""
        scores, pairs = self.heads * self.latents * self.keys, self.heads * self.keys
        width, passes = self.width // self.heads, (False, True) if self.backward else (False,)
        attention = [attention_work(scores, pairs, width, width, "float32", pass_, device()) for pass_ in passes]
        projections = (3 if self.backward else 1) * 4 * self.keys * self.width**2
        moved = len(passes) * self.keys * self.width * BYTES["float32"]
        return Work(sum(w.exponentials for w in attention), sum(w.products for w in attention) + projections, moved)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {OURS: lambda inputs: self._run(self._ours, inputs), TORCH: lambda inputs: self._run(self._theirs, inputs)}

    @cached_property
    def _theirs(self) -> nn.MultiheadAttention:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.MultiheadAttention(self.width, self.heads, batch_first=True).to(device())

    @cached_property
    def _ours(self) -> MultiheadAttention:
        ours = MultiheadAttention(self.width, self.heads, batch_first=True).to(device())
        ours.load_state_dict(self._theirs.state_dict())
        return ours

    def _run(self, module: nn.Module, inputs: ModuleInputs) -> Sequence[Tensor]:
        with torch.set_grad_enabled(self.backward):
            out = module.forward(inputs.latents, inputs.context, inputs.context, need_weights=False)[0]  # the counter cannot follow modules
        if not self.backward:
            return (out,)
        return out.detach(), *torch.autograd.grad(out, [*inputs[:2], *module.parameters()], inputs.dout)

    def inputs(self, seed: int) -> ModuleInputs:
        random = generator(seed)
        latents, context = (normal(random, 1, length, self.width).requires_grad_(self.backward) for length in (self.latents, self.keys))
        return ModuleInputs(latents, context, normal(random, *(latents.shape if self.backward else (0,))))

    def oracle(self, inputs: ModuleInputs) -> Mapping[str, Sequence[Tensor]]:
        """The definition by autograd, with the parameters of the module, head by head."""
        module = deepcopy(self._theirs).double()
        latents, context = (part.detach().double().requires_grad_(self.backward) for part in inputs[:2])
        parts = zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), (latents, context, context), strict=True)
        heads = [F.linear(x, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w, b, x in parts]
        if not self.backward:
            (out,) = exact(*heads)
            return dict.fromkeys(self.implementations, (module.out_proj(out.transpose(1, 2).flatten(-2)).detach(),))
        attended = F.scaled_dot_product_attention(*heads)
        out = module.out_proj(attended.transpose(1, 2).flatten(-2))
        gradients = torch.autograd.grad(out, [latents, context, *module.parameters()], inputs.dout.double())
        return dict.fromkeys(self.implementations, (out.detach(), *gradients))

    def small(self) -> Module:
        return replace(self, keys=min(self.keys, 4096))

    def refusal(self, implementation: str) -> str | None:
        return lacking_memory(20 * self.width * self.keys)


UPDATE, FORWARD, WITH_SDPA = "cmab_kernels.nn.CMAB.update", "cmab_kernels.nn.CMAB.forward", f"the block with {SDPA}"


class BlockInputs(NamedTuple):
    """All points, the latents of the one who asks, and the state of all points but the last."""

    points: Tensor
    latents: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Block(OperatorCase):
    """A Constant Memory Attention Block that has read `keys` points, given one more: by its state, and from all points again."""

    heads: int = 4
    width: int = 64
    keys: int = 100_000
    latents: int = 128
    threads: int | None = field(default=None, kw_only=True)

    scan = "nn.CMAB"
    baselines = (WITH_SDPA,)
    work = None  # most of an update is the layers behind the attention

    def __str__(self) -> str:
        return f"cmab-one-point-after-{self.keys}-float32-{self.heads}-heads-C{self.width}-L{self.latents}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"H": self.heads, "L": self.latents, "N": self.keys, "C": self.width}

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {UPDATE: self._update, FORWARD: self._forward, WITH_SDPA: self._with_sdpa}

    @cached_property
    def _block(self) -> CMAB:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return CMAB(self.width, self.latents, self.heads).to(device()).eval()

    @torch.no_grad()
    def _update(self, inputs: BlockInputs) -> Sequence[Tensor]:
        state = AttentionState(inputs.out, inputs.lse)
        return (self._block.update(inputs.points[:, -1:], inputs.latents, state).latents,)

    @torch.no_grad()
    def _forward(self, inputs: BlockInputs) -> Sequence[Tensor]:
        return (self._block(inputs.points, inputs.latents),)

    @torch.no_grad()
    def _with_sdpa(self, inputs: BlockInputs, block: CMAB | None = None) -> Sequence[Tensor]:
        """All keys and values in memory; what follows the attention over the points is an update of its result with no points at all."""
        block = block or self._block
        cross = block.compress.cross_attention
        query = cross.heads(cross.query, cross.norm(block.latents)).unsqueeze(0)
        context = cross.context_norm(inputs.points)
        attended = F.scaled_dot_product_attention(query, cross.heads(cross.key, context), cross.heads(cross.value, context))
        state = AttentionState(attended, attended.new_zeros(attended.shape[:-1], dtype=torch.float64))
        return (block.update(inputs.points[:, :0], inputs.latents, state).latents,)

    @torch.no_grad()
    def inputs(self, seed: int) -> BlockInputs:
        random = generator(seed)
        points, latents = normal(random, 1, self.keys + 1, self.width), normal(random, self.latents, self.width)
        state = self._block.update(points[:, :-1], latents, self._block.init_state(1)).state
        return BlockInputs(points, latents, *state)

    def oracle(self, inputs: BlockInputs) -> Mapping[str, Sequence[Tensor]]:
        doubles = BlockInputs(*(part.double() for part in inputs))
        return dict.fromkeys(self.implementations, self._with_sdpa(doubles, deepcopy(self._block).double()))

    def small(self) -> Block:
        return replace(self, keys=min(self.keys, 4096))

    def refusal(self, implementation: str) -> str | None:
        return lacking_memory(40 * self.width * self.keys)


CASES: list[Case] = [
    *(Module(keys=keys, quick=keys in (10_000, 100_000)) for keys in (1000, 10_000, 100_000, 1_000_000)),
    *(Module(keys=keys, backward=True) for keys in (1000, 10_000, 100_000)),
    *(Module(heads) for heads in (1, 2, 8)),
    *(Block(keys=keys, quick=True) for keys in (1000, 10_000, 100_000)),
    Block(keys=1_000_000),
]
