"""Layers of a Transformer over a stream, compared with a dozen lines of torch with a ring buffer of keys and values.

Figures are per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels.nn import ContinualEncoderLayer

from ..devices import device, generator, normal
from ..floors import Work, step_work
from .case import Case, Results, declared, everything_runs
from .continual import WINDOWS, Call, Streams, all_steps, banded, stream_case
from .eager import ITERATIONS, EagerNystrom

OURS = "cmab_kernels.nn.ContinualEncoderLayer"
OURS_NYSTROM = f"{OURS}, by landmarks"
RING = "a ring of keys and values, and torch's modules"
BARE = "a ring of keys and values, and torch's functions"


class Ring:
    """torch's layer (post-norm, ReLU) at the newest of n tokens: its key and value replace the oldest, and its query
    attends to all keys."""

    def __init__(self, layer: nn.TransformerEncoderLayer, tokens: Tensor) -> None:
        """The first window (1, n, C) of a stream."""
        self.layer, self.attention, self.window, self.place = layer, layer.self_attn, tokens.shape[1], 0
        packed = F.linear(tokens, self.attention.in_proj_weight, self.attention.in_proj_bias)
        _, key, value = (
            part.contiguous() for part in packed.unflatten(-1, (3, self.attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        self.key, self.value = key, value

    def attended(self, token: Tensor) -> Tensor:
        attention = self.attention
        packed = F.linear(token, attention.in_proj_weight, attention.in_proj_bias)
        query, key, value = packed.view(1, 3, attention.num_heads, 1, attention.head_dim).unbind(1)
        self.key[:, :, self.place], self.value[:, :, self.place] = key[:, :, 0], value[:, :, 0]
        self.place = (self.place + 1) % self.window
        return F.scaled_dot_product_attention(query, self.key, self.value).view(1, -1)

    def step(self, token: Tensor) -> Tensor:
        layer = self.layer
        token = layer.norm1(token + self.attention.out_proj(self.attended(token)))
        result: Tensor = layer.norm2(token + layer.linear2(F.relu(layer.linear1(token))))
        return result


class BareRing:
    """The same layer, as fast as we could write it in torch: weights are looked up in advance, no module is called, and
    one copy writes key and value."""

    def __init__(self, layer: nn.TransformerEncoderLayer, tokens: Tensor) -> None:
        ring, norms = Ring(layer, tokens), (layer.norm1, layer.norm2)
        self.heads, self.window, self.place = layer.self_attn.num_heads, tokens.shape[1], 0
        self.rows = torch.stack([ring.key[0].transpose(0, 1), ring.value[0].transpose(0, 1)], 1)  # (n, 2, H, D)
        self.key, self.value = (part.transpose(0, 1)[None] for part in self.rows.unbind(1))
        linear = (layer.self_attn.out_proj, layer.linear1, layer.linear2)
        self.enter = layer.self_attn.in_proj_weight.detach(), layer.self_attn.in_proj_bias.detach()
        self.leave, self.expand, self.contract = ((part.weight.detach(), part.bias.detach()) for part in linear)
        self.norms = [(norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps) for norm in norms]

    def step(self, token: Tensor) -> Tensor:
        packed = F.linear(token, *self.enter).view(3, self.heads, -1)
        self.rows[self.place] = packed[1:]
        self.place = (self.place + 1) % self.window
        out = F.scaled_dot_product_attention(packed[:1].transpose(0, 1)[None], self.key, self.value)
        token = F.layer_norm(token + F.linear(out.view(1, -1), *self.leave), *self.norms[0])
        hidden = F.relu(F.linear(token, *self.expand))
        return F.layer_norm(token + F.linear(hidden, *self.contract), *self.norms[1])


@declared()
def layer_step(
    window: int = 256, width: int = 16, calls: int = 64, heads: int = 4, hidden: int = 128, landmarks: int = 16
) -> Case:
    """One stream in float32. With landmarks that change with the window, a layer computes something else."""
    features = heads * width

    @cache
    def weights() -> nn.TransformerEncoderLayer:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.TransformerEncoderLayer(features, heads, hidden, batch_first=True, device=device()).eval()

    @torch.no_grad()
    def started(name: str, given: Streams, seed: int) -> Call:
        (tokens,) = given
        after = [(token.contiguous(),) for token in tokens[:, window:].unbind(1)]
        if name in PEERS:
            return all_steps(PEERS[name](weights(), tokens[:, :window]).step, after)
        options = {"batch_first": True, "device": device(), "sequence_len": window}
        ours = ContinualEncoderLayer(
            features, heads, hidden, **options, num_landmarks=landmarks if name == OURS_NYSTROM else None
        ).eval()
        ours.load_state_dict(weights().state_dict())
        ours.forward_steps(tokens[:, :window])
        return all_steps(ours.forward_step, after)

    @torch.no_grad()
    def oracle(i: Streams) -> Mapping[str, Results]:
        """Attention by its definition in float64, between the layer's other parts in float64."""
        layer = nn.TransformerEncoderLayer(
            features, heads, hidden, batch_first=True, dtype=torch.float64, device=i[0].device
        )
        layer.load_state_dict(weights().state_dict())
        layer.eval()
        tokens, attention = i[0].double(), layer.self_attn
        packed = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        query, key, value = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        first = (part[0, :, :window] for part in (query, key, value))
        nystrom = EagerNystrom(*first, width**-0.5, landmarks, None, ITERATIONS)
        steps = zip(*(part[0, :, window:].split(1, 1) for part in (query, key, value)), strict=True)
        attended = {
            OURS: banded(query[:, :, window:], key, value, window)[0],
            OURS_NYSTROM: torch.cat([nystrom.step(*t) for t in steps], 1),
        }

        def rest(rows: Tensor) -> Results:
            out = attention.out_proj(rows.transpose(0, 1).flatten(1))
            after = layer.norm1(tokens[0, window:] + out)
            return layer.norm2(after + layer.linear2(layer.linear1(after).relu())).split(1)

        results = {name: rest(rows) for name, rows in attended.items()}
        return results | dict.fromkeys(PEERS, results[OURS])

    names = (OURS, OURS_NYSTROM, *PEERS)
    others = Work(0.0, 2 * (4 * features**2 + 2 * features * hidden), 0.0)  # the weights stay in a cache
    return stream_case(
        lambda seed: [normal(generator(seed), 1, window + calls, features)],
        {name: partial(started, name) for name in names},
        everything_runs,
        scan=OURS.removeprefix("cmab_kernels."),
        name=f"ContinualEncoderLayer-step-float32-{heads}-heads-C{features}-F{hidden}-n{window}-m{landmarks}",
        sizes={"H": heads, "n": window, "D": width, "F": hidden, "m": landmarks},
        oracle=oracle,
        baselines=(RING, BARE),
        others=(OURS_NYSTROM,),
        work=step_work("single", heads, window, landmarks, width, "float32") + others,
        steps=dict.fromkeys(names, calls),
    )


PEERS: dict[str, Callable[..., Any]] = {RING: Ring, BARE: BareRing}


def cases() -> Iterator[Case]:
    yield from (layer_step(window, calls=max(64, window // 16), quick=window == 256) for window in WINDOWS)
