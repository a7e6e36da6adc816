"""`explain` of a module sees all calls of attention, and leaves nothing on any module."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmab_kernels
import cmab_kernels.nn
from cmab_kernels.integrations import scaled_dot_product_attention


class Copies(nn.Module):
    """A module that copies one of its parts inside its call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = cmab_kernels.nn.MultiheadAttention(16, 2, batch_first=True)
        self.copies: list[nn.Module] = []

    def forward(self, tokens: Tensor) -> Any:
        self.copies.append(copy.deepcopy(self.part))
        return self.part(tokens, tokens, tokens, need_weights=False)[0]


def test_a_module_made_inside_is_none_of_explains() -> None:
    model, call = Copies(), nn.Module.__call__
    assert [row.fused for row in cmab_kernels.explain(model, torch.randn(1, 5, 16))] == [True]
    for module in (model.part, *model.copies):
        assert "forward" not in module.__dict__
        pickle.dumps(module)
    assert nn.Module.__call__ is call


def test_nothing_stays_when_threads_overlap_or_fail() -> None:
    """The call that begins first ends first; a third call fails."""
    part = cmab_kernels.nn.MultiheadAttention(16, 2, batch_first=True)
    begun, ended, rows, call = threading.Event(), threading.Event(), {}, nn.Module.__call__

    class Waits(nn.Module):
        def __init__(self, before: threading.Event, after: threading.Event | None) -> None:
            super().__init__()
            self.part, self.wait = part, (before, after)

        def forward(self, tokens: Tensor) -> Any:
            self.wait[0].set()
            if self.wait[1] is not None:
                assert self.wait[1].wait(30)
            return self.part(tokens, tokens, tokens, need_weights=False)

    def second() -> None:
        assert begun.wait(30)
        started = threading.Event()
        rows["second"] = cmab_kernels.explain(Waits(started, ended), torch.randn(1, 5, 16))

    thread = threading.Thread(target=second)
    thread.start()
    rows["first"] = cmab_kernels.explain(Waits(begun, None), torch.randn(1, 5, 16))
    with pytest.raises(AttributeError):
        cmab_kernels.explain(Waits(begun, None), None)
    ended.set()
    thread.join()
    assert all(len(each) == 1 and each[0].fused for each in rows.values())
    assert "forward" not in part.__dict__ and nn.Module.__call__ is call
    pickle.dumps(part)


class Own(nn.Module):
    """A model with attention of its own, which calls torch's function."""

    def forward(self, few: Tensor, many: Tensor, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(few, many, many, is_causal=causal)


def test_the_function_in_place_of_torchs_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    model = nn.ModuleDict({"block": Own()})
    model.forward = lambda *given: [model["block"](*given, causal) for causal in (False, True)]
    rows = cmab_kernels.explain(model, torch.randn(1, 2, 40, 8), torch.randn(1, 2, 900, 8))
    assert [(row.module, row.kind, row.fused) for row in rows] == [("block", "Own", True), ("block", "Own", False)]
    assert rows[1].reason == "attention is causal"


def test_a_kernel_without_gradients_has_a_row_in_a_profile() -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 40, 8)
    block, state = cmab_kernels.nn.CMABStack(16, 4, 2, 2), cmab_kernels.continual_attention_init(key, key, key)
    calls = {
        "cmab::attention": lambda: cmab_kernels.latent_attention(query, key, key),
        "cmab::continual_attention_step": lambda: cmab_kernels.continual_attention_step(
            state, key[:, :, :1], *[key[:, :, :1]] * 2
        ),
        "cmab::ridge_update": lambda: cmab_kernels.ridge_state(key, key),
        "cmab::block_stack": lambda: block.update(torch.randn(1, 9, 16), torch.randn(3, 16)),
        "cmab::block_stack_read": lambda: block.read(torch.randn(1, 9, 16)),
    }
    for name, call in calls.items():
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        assert name in {row.key for row in profile.key_averages()}
