"""The methods of the demo `cmab`: a block reads the pixels of a photograph in three ways, with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import AttentionState, latent_attention
from ...measure import Task
from ...nn import CMAB
from ...runtime.backends import use_impl

DIM, LATENTS, HEADS = 64, 128, 4
FEATURES = 5
CHUNK = 32_768
"""Pixels in a chunk of the stream."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@functools.cache
def photograph() -> Tensor:
    """Return the 1411 x 1411 colour photograph of a retina from scikit-image: (height, width, 3) uint8."""
    from skimage import data

    return torch.from_numpy(data.retina().copy())


@functools.cache
def pixels(device: str) -> Tensor:
    """Return all pixels of the photograph in a random order: (1, N, 5).

    The features are two coordinates in [-1, 1] and three colours in [-0.5, 0.5].
    """
    photo = photograph()
    axes = (torch.linspace(-1, 1, size) for size in photo.shape[:2])
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    features = torch.cat([coordinates, photo / 255 - 0.5], dim=-1).flatten(0, 1)
    shuffled = features[torch.randperm(len(features), generator=torch.Generator().manual_seed(0))]
    return shuffled.unsqueeze(0).to(device)


@dataclass
class Reader:
    """An embedding of pixels, and a block that conditions 128 latents on the embedded pixels."""

    block: CMAB
    embed: nn.Module
    latents: Tensor
    torch_attention: nn.MultiheadAttention
    """torch's attention module with the weights of the block's attention over the pixels.

    Its output projection is the identity.
    """

    @staticmethod
    def make(device: str) -> Reader:
        """Return a reader with the same random weights at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            block, latents = CMAB(DIM, LATENTS, HEADS), torch.randn(LATENTS, DIM)
            embed = nn.Sequential(nn.Linear(FEATURES, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
            torch_attention = nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True)
        cross = block.compress.cross_attention
        with torch.no_grad():
            torch_attention.in_proj_weight.copy_(torch.cat([cross.query.weight, cross.key.weight, cross.value.weight]))
            torch_attention.out_proj.weight.copy_(torch.eye(DIM))
        return Reader(block.to(device), embed.to(device), latents.to(device), torch_attention.to(device))

    def stream(self, points: Tensor, sizes: list[int] | None = None) -> tuple[Tensor, AttentionState]:
        """Read the points chunk by chunk, and keep only the state. Return the latents (1, L, C) and the last state.

        `sizes` are the lengths of the chunks. None means chunks of `CHUNK`.
        """
        state, result = self.block.init_state(1), self.latents
        for chunk in points.split(CHUNK if sizes is None else sizes, dim=1):
            result, state = self.block.update(self.embed(chunk), self.latents, state)
        return result, state

    def at_once(self, points: Tensor, attend: Attend) -> Tensor:
        """Read all points in one call of `attend`, with all keys and values in memory. Return the latents."""
        query, key, value = self.project(points)
        return self.finish(attend(query, key, value))

    def project(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (1, H, L, D), keys and values (1, H, N, D) of the attention over the pixels."""
        cross = self.block.compress.cross_attention
        normed = cross.context_norm(self.embed(points))
        return self._query(), cross.heads(cross.key, normed), cross.heads(cross.value, normed)

    def multihead(self, points: Tensor) -> Tensor:
        """Read all points with torch's module in place of the block's attention. The module also projects them."""
        cross = self.block.compress.cross_attention
        normed = cross.context_norm(self.embed(points))
        attended, _ = self.torch_attention(
            cross.norm(self.block.latents).unsqueeze(0), normed, normed, need_weights=False
        )
        return self.finish(attended.unflatten(-1, (HEADS, -1)).transpose(1, 2))

    def finish(self, attended: Tensor) -> Tensor:
        """Return the latents after the rest of the block, given the attention's output (1, H, L, D).

        To run the rest, the method updates a state with no pixels.
        """
        state = AttentionState(attended, attended.new_zeros(attended.shape[:-1], dtype=torch.float64))
        return self.block.update(attended.new_empty(1, 0, DIM), self.latents, state).latents

    def _query(self) -> Tensor:
        cross = self.block.compress.cross_attention
        return cross.heads(cross.query, cross.norm(self.block.latents)).unsqueeze(0)


CMAB_NAME, SDPA_NAME, MULTIHEAD_NAME, OPERATOR_NAME = (
    "CMAB",
    "scaled_dot_product_attention",
    "nn.MultiheadAttention",
    "latent_attention",
)
CONDITIONING: dict[str, Callable[[Reader, Tensor], Tensor]] = {
    CMAB_NAME: lambda reader, points: reader.stream(points)[0],
    SDPA_NAME: lambda reader, points: reader.at_once(points, F.scaled_dot_product_attention),
    MULTIHEAD_NAME: lambda reader, points: reader.multihead(points),
}
"""Method -> function from a reader and pixels to latents."""

ATTENTION: dict[str, Attend] = {OPERATOR_NAME: latent_attention, SDPA_NAME: F.scaled_dot_product_attention}
"""Method -> function from queries, keys and values to their attention."""


def conditioning(name: str, count: int, device: str, impl: str) -> Task:
    """Return the task that reads the first `count` pixels by one method of `CONDITIONING`."""
    use_impl(impl)
    return _task(functools.partial(CONDITIONING[name], Reader.make(device), pixels(device)[:, :count]))


def attention(name: str, count: int, device: str, impl: str) -> Task:
    """Return the task that attends to the keys and values of the first `count` pixels by one method of `ATTENTION`."""
    use_impl(impl)
    with torch.no_grad():
        operands = Reader.make(device).project(pixels(device)[:, :count])
    return _task(functools.partial(ATTENTION[name], *operands))


def _task(method: Callable[[], Tensor]) -> Task:
    @torch.no_grad()
    def task() -> list[Tensor]:
        return [method()]

    return task


def bytes_needed(name: str, count: int, impl: str) -> int:
    """Return a generous estimate of a method's bytes. The demo skips methods that would not fit; streams always fit."""
    keys_and_values = 2 * DIM * 4 * count
    scores = HEADS * LATENTS * 4 * count if name == OPERATOR_NAME and impl == "reference" else 0
    return 2**28 + (4 if name == MULTIHEAD_NAME else 2) * keys_and_values + 4 * scores
