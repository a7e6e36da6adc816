"""The same bits on every run, on a side stream, in a graph replayed a thousand times, alone and in a batch; grids and strides beyond 16 and
32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import implementation, kernel
from cmab_kernels.intention.api import solve_rows

from .problems import side_stream, why_not
from .sections import Row, Task

Bits = tuple[Tensor, ...]
Call = Callable[..., Bits]
"""A function from inputs, each with the batch in front, to results with the batch in front."""
REPLAYS = 1000


def _with_gradients(function: Callable[..., Bits], *given: Tensor) -> Bits:
    """The results of a function, and their gradients along ones."""
    leaves = tuple(t.detach().requires_grad_() for t in given)
    results = function(*leaves)
    return (*results, *torch.autograd.grad(results, leaves, tuple(map(torch.ones_like, results))))


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Bits:
    return _with_gradients(lambda *t: tuple(ck.attention_state(*t, key_padding_mask=mask, impl="triton")), q, k, v)


def _window(q: Tensor, k: Tensor, v: Tensor) -> Bits:
    return _with_gradients(lambda *t: (ck.nystrom_attention(*t, 16, impl="triton"),), q, k, v)


def _pinv(matrix: Tensor) -> Bits:
    return _with_gradients(lambda a: (ck.iterative_pinv(a, impl="triton"),), matrix)


def _solve(gram: Tensor, rhs: Tensor) -> Bits:
    return _with_gradients(lambda b: (ck.regularised_solve(gram, b, 1.0, impl="cuda").weight,), rhs)


def _ridge(impl: str, device: str) -> Call:
    """The sums, fast and exact, their gradients, rows times a solution, and where solves have a kernel, the solution with its sums."""
    solves = not why_not("regularised_solve", "cuda", device)

    def call(k: Tensor, v: Tensor, weights: Tensor, mask: Tensor) -> Bits:
        gram, gram_backward, apply_rows = (kernel("intention", impl, name) for name in ("gram", "gram_backward", "apply_rows"))
        sums = gram(k, v, weights, mask, (True, True), False)
        exact = gram(k, v, weights, mask, (True, True), True)
        grads = gram_backward(*sums, k, v, weights, mask, (True, True, True), False)
        alpha = torch.ones(k.shape[:2], dtype=torch.float64, device=k.device)
        solved = solve_rows(k, v, weights, mask, alpha, impl, "auto")[:2] if solves else ()
        return (*sums, *exact, *grads, apply_rows(k, sums[1]), *solved)

    return call


def _same(a: Bits, b: Bits) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _attention_inputs(dtype: torch.dtype, width: int, keys: int, device: str, latents: int = 128) -> Bits:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, width, device=device).to(dtype) for n in (latents, keys, keys))
    return q, k, v, torch.rand(2, keys, device=device) < 0.1


def _ridge_inputs(dtype: torch.dtype, width: int, keys: int, device: str) -> Bits:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 4, keys, width, device=device).to(dtype) for _ in range(2))
    weights = torch.rand(2, 4, keys, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return k, v, weights, torch.rand(2, keys, device=device) < 0.1


def _systems(dtype: torch.dtype, order: int, device: str) -> Bits:
    torch.manual_seed(0)
    a = torch.randn(2, 100, order, order, dtype=dtype, device=device)
    return a @ a.mT / order, torch.randn(2, 100, order, 16, dtype=dtype, device=device)


def again(call: Call, given: Bits, times: int) -> bool:
    """True if the same call gives the same bits so many times; a race between programs shows as other bits."""
    first = call(*given)
    return all(_same(call(*given), first) for _ in range(times))


def alone(call: Call, given: Bits) -> bool:
    whole = call(*given)
    parts = [call(*(t[i : i + 1] for t in given)) for i in range(2)]
    return _same(tuple(torch.cat(pair) for pair in zip(*parts, strict=True)), whole)


def on_a_side_stream(call: Call, given: Bits) -> bool:
    first = call(*given)
    with side_stream():
        other = call(*given)
    return _same(other, first)


def replayed_graph(call: Call, given: Bits) -> bool:
    """Captured once, replayed on other inputs in the same memory, again and again."""
    on_a_side_stream(call, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*given)
    for tensor in given:
        tensor.copy_(tensor.flip(0))  # the batch's other half: as sound as it was
    wanted = tuple(t.clone() for t in call(*given))
    alike = torch.ones((), dtype=torch.bool, device=given[0].device)
    for _ in range(REPLAYS):
        graph.replay()
        for ours, right in zip(captured, wanted, strict=True):
            alike &= (ours == right).all()
    return bool(alike)


def many_heads(device: str) -> bool:
    """66,000 programs on one grid axis."""
    q, k, v = (torch.randn(66_000, 1, n, 8, device=device) for n in (1, 3, 3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return bool((ck.latent_attention(q, k, v, impl="triton").double() - wanted).abs().max() < 1e-5)


def many_systems(device: str) -> bool:
    k, v = (torch.randn(66_000, 1, 3, 8, device=device) for _ in range(2))
    gram, moment = implementation("intention", "triton").gram(k, v, None, None, (True, True), False)
    return bool((gram - k.double().mT @ k.double()).abs().max() < 1e-4 and (moment - k.double().mT @ v.double()).abs().max() < 1e-4)


def many_matrices(device: str) -> bool:
    """The bits of the last of 66,000 as they are alone."""
    matrix = torch.randn(66_000, 16, 16, device=device).softmax(-1)
    return torch.equal(ck.iterative_pinv(matrix, impl="triton")[-1:], ck.iterative_pinv(matrix[-1:], impl="triton"))


def distant_rows(call: Call, given: Bits, which: int) -> bool:
    """Keys 2**30 elements apart: the third lies beyond the reach of 32 bits."""
    step = 2**30
    keys = given[which]
    storage = torch.empty(2 * step + 8, dtype=keys.dtype, device=keys.device)
    distant = storage.as_strided((1, 1, 3, 8), (0, 0, step, 1))
    distant.copy_(keys)
    return _same(call(*(distant if i == which else t for i, t in enumerate(given))), call(*given))


def _of_each(name: str, call: Call, given: Bits, times: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    yield f"{times} repeats, {name}", lambda: again(call, given, times)
    yield f"alone and in a batch, {name}", lambda: alone(call, given)
    yield f"side stream, {name}", lambda: on_a_side_stream(call, given)
    yield f"{REPLAYS:,} replays of a graph, {name}", lambda: replayed_graph(call, given)


def checks(device: str, times: int = 200) -> Iterator[tuple[str, Callable[[], bool]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for width in (16, 64):
            name = f"{str(dtype).removeprefix('torch.')}, heads of {width}"
            yield from _of_each(f"attention, {name}", _attention, _attention_inputs(dtype, width, 20_000, device), times)
            several = _attention_inputs(dtype, width, 20_000, device, 300)
            yield f"{times // 4} repeats with several blocks of queries, {name}", lambda given=several: again(_attention, given, times // 4)
            rows = _ridge_inputs(dtype, width, 20_000, device)
            for impl in ("triton", "cuda"):
                if not why_not("intention", impl, device):
                    yield from _of_each(f"Intention in {impl}, {name}", _ridge(impl, device), rows, times // 4)
            windows = _attention_inputs(dtype, width, 2000, device, 2000)[:3]
            yield from _of_each(f"Nyström windows, {name}", _window, windows, times // 4)
    for dtype in (torch.float32, torch.float64):
        for size in (16, 64):
            name = f"{size} wide, {str(dtype).removeprefix('torch.')}"
            yield from _of_each(f"pinv, {name}", _pinv, (torch.randn(2, 300, size, size, dtype=dtype, device=device).softmax(-1),), times)
            if not why_not("regularised_solve", "cuda", device):
                yield from _of_each(f"solve, {name}", _solve, _systems(dtype, size, device), times)
    yield "66,000 heads", lambda: many_heads(device)
    yield "66,000 systems", lambda: many_systems(device)
    yield "66,000 matrices", lambda: many_matrices(device)
    q, v = torch.randn(1, 1, 4, 8, device=device).half(), torch.randn(1, 1, 3, 8, device=device).half()
    yield "rows 2**30 elements apart", lambda: distant_rows(_attention, (q, v.clone(), v), 1)
    weights, mask = torch.rand(1, 1, 3, device=device), torch.zeros(1, 3, dtype=torch.bool, device=device)
    yield "rows 2**30 elements apart, Intention", lambda: distant_rows(_ridge("triton", device), (v.clone(), v, weights, mask), 0)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return [Task(name, lambda check=check: {"ok": check()}) for name, check in checks(device)]
