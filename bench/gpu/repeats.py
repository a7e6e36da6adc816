"""The same bits on every run, on a side stream, in a replayed graph, alone and in a batch; grids and strides beyond 16 and 32 bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck

Bits = tuple[Tensor, ...]


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Bits:
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*leaves, key_padding_mask=mask, impl="triton")
    return (*state, *torch.autograd.grad(tuple(state), leaves, tuple(torch.ones_like(t) for t in state)))


def _same(a: Bits, b: Bits) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _inputs(dtype: torch.dtype, width: int, keys: int, device: str, latents: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, width, device=device).to(dtype) for n in (latents, keys, keys))
    return q, k, v, torch.rand(2, keys, device=device) < 0.1


def again(dtype: torch.dtype, width: int, keys: int, device: str, times: int, latents: int = 128) -> bool:
    """Forward and backward, again and again. A race between programs shows as other bits."""
    given = _inputs(dtype, width, keys, device, latents)
    first = _call(*given)
    return all(_same(_call(*given), first) for _ in range(times))


def alone(dtype: torch.dtype, width: int, keys: int, device: str) -> bool:
    q, k, v, mask = _inputs(dtype, width, keys, device)
    whole = _call(q, k, v, mask)
    parts = [_call(*(t[i : i + 1] for t in (q, k, v, mask))) for i in range(2)]
    return _same(tuple(torch.cat(pair) for pair in zip(*parts, strict=True)), whole)


def side_stream(dtype: torch.dtype, width: int, keys: int, device: str) -> bool:
    given = _inputs(dtype, width, keys, device)
    first = _call(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = _call(*given)
    stream.synchronize()
    return _same(other, first)


def replayed_graph(dtype: torch.dtype, width: int, keys: int, device: str) -> bool:
    """Captured once, replayed on other inputs in the same memory."""
    given = _inputs(dtype, width, keys, device)
    side_stream(dtype, width, keys, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _call(*given)
    for tensor in given[:3]:
        tensor.copy_(torch.randn(tensor.shape, device=device).to(dtype))
    graph.replay()
    torch.cuda.synchronize()
    return _same(captured, _call(*given))


def many_heads(device: str) -> bool:
    """66,000 programs on one grid axis."""
    q, k, v = (torch.randn(66_000, 1, n, 8, device=device) for n in (1, 3, 3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return bool((ck.latent_attention(q, k, v, impl="triton").double() - wanted).abs().max() < 1e-5)


def distant_rows(device: str) -> bool:
    """Keys 2**30 elements apart: the third lies beyond the reach of 32 bits."""
    step = 2**30
    storage = torch.empty(2 * step + 8, dtype=torch.float16, device=device)
    keys = storage.as_strided((1, 1, 3, 8), (0, 0, step, 1))
    keys.copy_(torch.randn(1, 1, 3, 8))
    q, v = torch.randn(1, 1, 4, 8, device=device).half(), torch.randn(1, 1, 3, 8, device=device).half()
    return _same(_call(q, keys, v), _call(q, keys.clone(memory_format=torch.contiguous_format), v))


def checks(device: str, times: int = 200) -> Iterator[tuple[str, Callable[[], bool]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for width in (16, 64):
            name = f"{str(dtype).removeprefix('torch.')}, heads of {width}"
            arguments = (dtype, width, 20_000, device)
            yield f"{times} repeats, {name}", lambda arguments=arguments: again(*arguments, times)
            yield (
                f"{times // 4} repeats with several blocks of queries, {name}",
                lambda arguments=arguments: again(*arguments, times // 4, 300),
            )
            yield f"alone and in a batch, {name}", lambda arguments=arguments: alone(*arguments)
            yield f"side stream, {name}", lambda arguments=arguments: side_stream(*arguments)
            yield f"replayed graph, {name}", lambda arguments=arguments: replayed_graph(*arguments)
    yield "66,000 heads", lambda: many_heads(device)
    yield "rows 2**30 elements apart", lambda: distant_rows(device)


def run(device: str) -> Iterator[dict[str, Any]]:
    for name, check in checks(device):
        start = time.perf_counter()
        yield {"check": name, "ok": check(), "seconds": time.perf_counter() - start}
