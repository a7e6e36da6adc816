"""Rows of a batch that begin, pause and end by themselves: each has the bits of a stream whose batch does the same in all rows."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.nn import CircularPositionalEncoding, ContinualAttention, ContinualEncoder, ContinualEncoderLayer, StaggeredWindow
from cmab_kernels.nn import RetroactiveEncoderLayer as Retroactive

from .test_continual import DIM, KINDS, OUTPUTS
from .test_continual import made as attention
from .test_continual_stream import saved

ROWS, WINDOW = 5, 6


def encoder(layer: type[ContinualEncoderLayer], **config: Any) -> Callable[..., nn.Module]:
    def made(dtype: torch.dtype) -> nn.Module:
        one = layer(DIM, 3, 32, sequence_len=4, dtype=dtype, batch_first=True, **config)
        return ContinualEncoder(one, 3, nn.LayerNorm(DIM, dtype=dtype)).eval()

    return made


MODULES: dict[str, Callable[..., Any]] = {
    **{
        f"{kind}, {output}": lambda dtype, kind=kind, output=output: attention(kind, output=output, sequence_len=WINDOW, dtype=dtype)
        for kind in KINDS
        for output in OUTPUTS
    },
    "layer": lambda dtype: ContinualEncoderLayer(DIM, 3, 32, sequence_len=WINDOW, dtype=dtype).eval(),
    "retroactive layer": lambda dtype: Retroactive(DIM, 3, 32, sequence_len=WINDOW, dtype=dtype, norm_first=True).eval(),
    "encoder": encoder(ContinualEncoderLayer),
    "Nyström encoder": encoder(ContinualEncoderLayer, num_landmarks=2, norm_first=True),
    "retroactive encoder": encoder(Retroactive),
}


def row_of(out: Tensor, row: int) -> Tensor:
    """Return a row of a result of `forward_step`: (B, C), or of a retroactive module (n, B, C), or (B, n, C) with `batch_first`."""
    return out.select(0 if out.dim() == 2 else out.shape.index(ROWS), row)


class Alone:
    """The stream of one row: a module of the same batch that steps when this row has a token, in all rows."""

    def __init__(self, module: nn.Module, row: int) -> None:
        self.module, self.row = copy.deepcopy(module), row
        self.module.clean_state()

    def step(self, token: Tensor) -> Tensor | None:
        others = torch.randn_like(token.expand(ROWS, -1))
        others[self.row] = token
        out = self.module.forward_step(others)
        return None if out is None else row_of(out, self.row)


def schedule(steps: int, seed: int) -> list[tuple[list[int], Tensor]]:
    """Return (rows that begin anew, rows without a token) before and at each step."""
    draw = random.Random(seed)
    often = [draw.choice([0.2, 0.6, 0.9, 1.0]) for _ in range(ROWS)]
    made = []
    for at in range(steps):
        begin = [row for row in range(ROWS) if draw.random() < 0.03]
        gone = [draw.random() > share for share in often]
        made.append((begin, torch.tensor(gone if at % 9 else [True] * ROWS)))
    return made


def through(module: Any, change: Callable[[Any, int], Any] = lambda module, at: module, steps: int = 90, seed: int = 0) -> None:
    """Follow a schedule with a module, which `change` may replace before each step, and compare each row with its own stream."""
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    alone = [Alone(module, row) for row in range(ROWS)]
    results = 0
    for at, (begin, absent) in enumerate(schedule(steps, seed)):
        module = change(module, at)
        if begin:
            module.clean_state(begin if at % 2 else torch.tensor([row in begin for row in range(ROWS)]))
            for row in begin:
                alone[row].module.clean_state()
        tokens = torch.randn(ROWS, DIM, dtype=torch.float64).to(dtype)
        wanted = [None if absent[row] else alone[row].step(tokens[row]) for row in range(ROWS)]
        tokens[absent] = torch.nan  # what stands for no token is not read
        out = module.forward_step(tokens, key_padding_mask=absent if at % 4 else absent[:, None])
        ready = module.ready
        for row in range(ROWS):
            mine = row_of(out, row)
            if wanted[row] is None:
                assert mine.isnan().all()
                assert absent[row] or not ready[row]
            else:
                assert ready[row] and torch.equal(mine, wanted[row]), (at, row)
                results += 1
    assert results > steps / 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_each_row_is_a_stream_of_its_own(name: str, dtype: torch.dtype) -> None:
    through(MODULES[name](dtype))
