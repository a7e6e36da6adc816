"""What each family promises beside its numbers: gradients to second order, whole graphs for the compiler, few launches, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import implementation

from .problems import launches, waits, why_not
from .sections import Row, Task

Bits = tuple[Tensor, ...]
Operation = tuple[Callable[..., Tensor], Bits]
"""A function of an implementation's name and tensors, and tensors for it."""


def operations(device: str, dtype: torch.dtype) -> dict[str, tuple[str, Operation]]:
    """name -> implementation, operation; one of each family that has kernels for a GPU."""

    def tokens(*lengths: int) -> Bits:
        torch.manual_seed(0)
        return tuple(torch.randn(2, 2, n, 16, device=device, dtype=dtype) for n in lengths)

    def square(a: Tensor) -> Tensor:
        return a @ a.mT + torch.eye(a.shape[-1], device=device, dtype=dtype)

    found = {
        "latent_attention": ("triton", (lambda impl, q, k, v: ck.latent_attention(q, k, v, impl=impl), tokens(20, 1500, 1500))),
        "nystrom_attention": ("triton", (lambda impl, q, k, v: ck.nystrom_attention(q, k, v, 8, impl=impl), tokens(300, 300, 300))),
        "iterative_pinv": ("triton", (lambda impl, a: ck.iterative_pinv(a.softmax(-1), 3, impl=impl), tokens(16))),
        "ridge_state": ("triton", (lambda impl, k, v: ck.ridge_state(k, v, impl=impl).moment.to(k.dtype), tokens(1500, 1500))),
        "intention": ("cuda", (lambda impl, q, k, v: ck.intention(q, k, v, 1.0, form="primal", impl=impl), tokens(20, 1500, 1500))),
        "regularised_solve": ("cuda", (lambda impl, a, b: ck.regularised_solve(square(a), b, 1.0, impl=impl).weight, tokens(16, 16))),
    }
    return {name: (impl, operation) for name, (impl, operation) in found.items() if not why_not(name, impl, device)}


def _leaves(tensors: Bits) -> Bits:
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def _second_order(function: Callable[..., Tensor], impl: str, tensors: Bits) -> Bits:
    leaves = _leaves(tensors)
    first = torch.autograd.grad(function(impl, *leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def second_order(function: Callable[..., Tensor], impl: str, tensors: Bits) -> Row:
    """The error of second-order gradients in float64, against the definition's."""
    ours, right = (_second_order(function, each, tensors) for each in (impl, "reference"))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, right, strict=True))
    return {"error": error, "ok": error < 1e-9}


def compiled(function: Callable[..., Tensor], impl: str, tensors: Bits) -> Row:
    """Whether `torch.compile` takes the operation without a break in the graph, with the results and gradients that it has eagerly."""

    def call(*leaves: Tensor) -> Tensor:
        return function(impl, *leaves)

    found = []
    for run in (torch.compile(call, fullgraph=True), call):
        leaves = _leaves(tensors)
        out = run(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))
    return {"error": error, "ok": error < 1e-4}


def waits_for_nothing(function: Callable[..., Tensor], impl: str, tensors: Bits) -> Row:
    """Whether neither forward nor backward waits for the device, once everything is compiled."""
    dout = torch.ones_like(function(impl, *tensors))

    def call() -> None:
        leaves = _leaves(tensors)
        torch.autograd.grad(function(impl, *leaves), leaves, dout)

    call()
    return {"ok": False, "problem": "it waits for the device"} if waits(call) else {"ok": True}


def _single_launches(device: str) -> dict[str, Callable[[], Any]]:
    attention, ridge, nystrom = (implementation(family, "triton") for family in ("attention", "intention", "nystrom"))
    q, k = (torch.randn(2, 2, n, 64, device=device) for n in (128, 1024))
    a = torch.randn(8, 16, 16, device=device).softmax(-1)
    return {
        "attention over 1,024 keys": lambda: attention.attention_forward(q, k, k, None, None, None, None, 0.125),
        "both sums of 1,024 keys of 16": lambda: ridge.gram(k[..., :16], k[..., :16], None, None, (True, True), False),
        "rows times a solution": lambda: ridge.apply_rows(k[..., :16], a.double()[:4].view(2, 2, 16, 16)),
        "pinv": lambda: nystrom.iterative_pinv(a, 6),
        "pinv's gradient": lambda: nystrom.iterative_pinv_backward(a, a, 6),
        "landmark values": lambda: nystrom.landmark_values(a, a, a, None, 0.25, 6),
    }


def _one_launch(call: Callable[[], Any]) -> Row:
    call()
    found = launches(call)
    return {"launches": found, "ok": found == 1}


def _tasks(device: str) -> Iterator[Task]:
    for name, (impl, (function, tensors)) in operations(device, torch.float64).items():
        yield Task(f"second order, {name}", lambda f=function, i=impl, t=tensors: second_order(f, i, t))
    narrow = operations(device, torch.float32)
    for name, (impl, (function, tensors)) in narrow.items():
        yield Task(f"nothing is waited for, {name}", lambda f=function, i=impl, t=tensors: waits_for_nothing(f, i, t))
    if torch.device(device).type == "cuda":
        for name, call in _single_launches(device).items():
            yield Task(f"one launch, {name}", lambda call=call: _one_launch(call))
    for name, (impl, (function, tensors)) in narrow.items():
        yield Task(f"torch.compile, {name}", lambda f=function, i=impl, t=tensors: compiled(f, i, t))


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return list(_tasks(device))
