"""`decay` and `key_bias` of `prefix_attention_states`. test_suite.py has accuracy, layouts and transforms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck

N = 133


def _inputs(dtype: torch.dtype = torch.float64, latents: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, latents, 8), (2, 3, N, 8), (2, 3, N, 7)
    q, k, v = (torch.randn(each, generator=generator, dtype=torch.float64).to(dtype) for each in shapes)
    return q, k, v


def _streamed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    every: int,
    state: ck.AttentionState | None,
    decay: Tensor,
    bias: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """The states that `attention_state` gives for one key after the other."""
    states = []
    for n in range(N):
        at = slice(n, n + 1)
        state = ck.attention_state(
            q,
            k[:, :, at],
            v[:, :, at],
            state=state,
            decay=decay.expand(2, 3, N)[..., at],
            key_bias=bias.expand(2, 3, N)[..., at],
            key_padding_mask=mask[:, at],
            impl="reference",
        )
        if (n + 1) % every == 0 or n == N - 1:
            states.append(state)
    out, lse = (torch.stack(parts, 2) for parts in zip(*states, strict=True))
    return out, lse


@pytest.mark.parametrize(
    "shape, every, stated",
    [
        ((), 3, True),
        ((N,), 1, False),
        ((3, 1), 64, False),
        ((2, 3, N), 1, True),
        ((2, 1, N), 70, True),
        ((N,), 1000, True),
    ],
)
def test_is_repeated_calls_with_decay(impl: str, shape: tuple[int, ...], every: int, stated: bool) -> None:
    """Results and gradients, also of the decay, are those of `attention_state` for one key after the other. Masked and
    excluded keys fade the others too."""
    torch.manual_seed(1)
    decay = (0.05 + 0.95 * torch.rand(shape, dtype=torch.float64)).requires_grad_()
    bias = (3 * torch.randn(2, 3, N, dtype=torch.float64)).masked_fill(torch.rand(2, 3, N) < 0.1, -math.inf)
    inputs = [x.requires_grad_() for x in (*_inputs(), bias)] + [decay]
    state, mask = None, torch.rand(2, N) < 0.2
    if stated:
        parts = [torch.randn(2, 3, 5, *last, dtype=torch.float64).requires_grad_() for last in ((7,), ())]
        inputs += parts
        state = ck.AttentionState(*parts)
    given = {"state": state, "decay": decay, "key_padding_mask": mask, "key_bias": bias}
    found = ck.prefix_attention_states(*inputs[:3], every=every, impl=impl, **given)
    right = _streamed(*inputs[:3], every, state, decay, bias, mask)
    slopes = torch.randn_like(right[0]), torch.randn_like(right[1]).masked_fill(right[1] == -math.inf, 0.0)
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, inputs, slopes)),
        (*right, *torch.autograd.grad(right, inputs, slopes)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)


def test_a_number_is_a_tensor_of_it(impl: str) -> None:
    q, k, v = _inputs()
    for every in (1, 7):
        number = ck.prefix_attention_states(q, k, v, every=every, decay=0.9, impl=impl)
        tensor = torch.full((2, 1, N), 0.9, dtype=torch.float64)
        assert all(map(torch.equal, number, ck.prefix_attention_states(q, k, v, every=every, decay=tensor, impl=impl)))
        none = ck.prefix_attention_states(q, k, v, every=every, decay=1, impl=impl)
        right = ck.prefix_attention_states(q, k, v, every=every, impl=impl)
        torch.testing.assert_close(none, right, rtol=1e-13, atol=1e-13)


def _recursion(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """out (N, L, E) and lse (N, L) of one head in float64, one key after the other."""
    scores, logs = (q.double() @ k.double().mT * k.shape[-1] ** -0.5).mT, decay.double().log()
    out, lse = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64), torch.full((q.shape[0],), -math.inf).double()
    outs, lses = [], []
    for score, value, log in zip(scores, v.double(), logs, strict=True):
        new = torch.logaddexp(lse + log, score)
        out = (lse + log - new).exp()[:, None] * out + (score - new).exp()[:, None] * value
        lse = new
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("law", ["0.9", "0.99999", "random", "tiny", "pauses"])
def test_long_streams_keep_their_digits(native: str, law: str) -> None:
    """Results hold in float32 over 5,000 keys whose decays multiply to e^-500 or less, with a state for each key and
    for many keys. A bias for each key would be off by 1e-5 or more."""
    generator = torch.Generator().manual_seed(0)
    rows = 5000
    q, k, v = (torch.randn(n, 8, generator=generator) for n in (3, rows, rows))
    random = torch.rand(rows, generator=generator)
    decay = {
        "0.9": torch.full((rows,), 0.9),
        "0.99999": torch.full((rows,), 0.99999),
        "random": random.clamp(min=1e-6),
        "tiny": torch.full((rows,), 1e-30),
        "pauses": torch.where(random < 0.01, 1e-20, 0.999),
    }[law]
    right = _recursion(q, k, v, decay)
    for every in (1, 100, 3000):
        found = ck.prefix_attention_states(*(x[None, None] for x in (q, k, v)), every=every, decay=decay, impl=native)
        ends = torch.arange(every, rows + every, every).clamp(max=rows) - 1
        assert (found.out[0, 0] - right[0][ends]).abs().max() < 2e-6
        assert (found.lse[0, 0] - right[1][ends]).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 3e8])
def test_a_state_that_nothing_is_added_to_fades_exactly(impl: str, size: float, dtype: torch.dtype) -> None:
    """The lse of the state falls by the same amount for every key, even if a float32 lse would not change at all."""
    q, k, v = _inputs(dtype)
    state = ck.AttentionState(torch.randn(2, 3, 5, 7, dtype=dtype), size + torch.rand(2, 3, 5, dtype=torch.float64))
    mask, log = torch.ones(2, N, dtype=torch.bool), -9.1 if size else -0.1
    found = ck.prefix_attention_states(q, k, v, state=state, decay=math.exp(log), key_padding_mask=mask, impl=impl)
    right = state.lse[:, :, None] + log * torch.arange(1, N + 1).double()[:, None]
    rescaled = 2e-7 * N if size else 1e-6  # the sums are rescaled, with the error of exp2
    assert (found.lse - right).abs().max() < (rescaled if dtype == torch.float32 else 1e-12) + 1e-15 * size
    assert (found.out - state.out[:, :, None]).abs().max() < 1e-5


@pytest.mark.parametrize("every", [1, 7])
def test_gradient_of_the_decay_in_float32(native: str, every: int) -> None:
    """The gradient is summed over a chunk, and not over the stream, so it does not lose digits along the stream."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator) for n in (4, 8000, 8000))
    decay = 0.5 + 0.5 * torch.rand(8000, generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        rate = decay.to(dtype).requires_grad_()
        states = ck.prefix_attention_states(*(x.to(dtype) for x in (q, k, v)), every=every, decay=rate, impl=native)
        found += torch.autograd.grad(states.lse.sum(), rate)
    assert (found[0] - found[1]).abs().max() < 3e-6 * found[1].abs().max()


def test_a_bad_number_stays_in_its_head(impl: str) -> None:
    """NaN and +inf in a bias make all later rows of their head NaN, and no others."""
    q, k, v = _inputs(torch.float32)
    bias = torch.randn(2, 3, N)
    clean = ck.prefix_attention_states(q, k, v, decay=0.9, key_bias=bias, impl=impl)
    for bad in (math.nan, math.inf):
        bias[0, 1, 77] = bad
        states = ck.prefix_attention_states(q, k, v, decay=0.9, key_bias=bias, impl=impl)
        assert states.out[0, 1, 77:].isnan().all() and states.lse[0, 1, 77:].isnan().all()
        assert all(torch.equal(a[0, 1, :77], b[0, 1, :77]) for a, b in zip(states, clean, strict=True))
        others = torch.ones(2, 3, dtype=torch.bool)
        others[0, 1] = False
        assert all(torch.equal(a[others], b[others]) for a, b in zip(states, clean, strict=True))


def test_transforms() -> None:
    """Compiled, exported and mapped calls, also over the decay alone; tensors are not read in a trace."""
    q, k, v = _inputs(torch.float32)
    bias, decay = torch.randn(3, N), 0.05 + 0.95 * torch.rand(N)

    def call(q: Tensor, bias: Tensor, decay: float | Tensor) -> tuple[Tensor, Tensor]:
        states = ck.prefix_attention_states(q, k, v, every=4, decay=decay, key_bias=bias)
        return states.out, states.lse

    for given in (decay, 0.5):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, bias, given), call(q, bias, given))
    wrong = torch.compile(call, fullgraph=True, backend="aot_eager")(q, bias, decay.index_fill(0, torch.tensor(40), 2))
    assert wrong[0][:, :, 10:].isnan().all() and wrong[0][:, :, :10].isfinite().all()
    many = torch.stack([decay, decay / 2])
    right = tuple(torch.stack(part) for part in zip(*(call(q, bias, x) for x in many), strict=True))
    torch.testing.assert_close(torch.func.vmap(call, (None, None, 0))(q, bias, many), right)
    inputs = [x.double() for x in (q, bias, decay)]
    k, v = k.double(), v.double()
    out, tangent = torch.func.jvp(lambda x: call(*inputs[:2], x)[1], (inputs[2],), (inputs[2],))
    step = 1e-6
    ahead, behind = (call(*inputs[:2], inputs[2] * (1 + x))[1] for x in (step, -step))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)

    class Reader(torch.nn.Module):
        def forward(self, q: Tensor, bias: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
            return call(q, bias, decay)

    program = torch.export.export(copy.deepcopy(Reader()), tuple(inputs))
    torch.testing.assert_close(program.module()(*inputs), call(*inputs))
    meta = ck.prefix_attention_states(*(x.to("meta") for x in (q.double(), k, v)), every=4, decay=0.5)
    assert meta.out.shape == (*out.shape, 7)


def test_a_broadcast_bias_is_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    from cmab_kernels.attention.prefix.schema import prefix_attention_op

    q, k, v = _inputs(torch.float32)
    bias, seen = torch.randn(1, 1, N), []
    monkeypatch.setattr(
        "cmab_kernels.attention.prefix.api.prefix_attention_op",
        lambda call: seen.append(call) or prefix_attention_op(call),
    )
    ck.prefix_attention_states(q, k, v, key_bias=bias)
    assert seen[0].key_bias.stride() == (0, 0, 1) and seen[0].key_bias.data_ptr() == bias.data_ptr()


def test_errors() -> None:
    q, k, v = _inputs(torch.float32)
    for wrong in (0, -0.5, 1.5, math.nan, torch.tensor([0.0]), torch.full((N,), 2.0), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match=r"^decay: got .*, expected (a number|numbers) in \(0, 1\]"):
            ck.prefix_attention_states(q, k, v, decay=wrong)
    with pytest.raises(ValueError, match=r"^decay: got shape \(2,\), .* broadcasts to \(2, 3, 133\)"):
        ck.prefix_attention_states(q, k, v, decay=torch.ones(2))
    for kind in ("0.5", [0.5], 0.5j, torch.ones(N, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"^decay: got"):
            ck.prefix_attention_states(q, k, v, decay=kind)
    with pytest.raises(ValueError, match=r"^key_bias: got shape \(2, 133\)"):
        ck.prefix_attention_states(q, k, v, key_bias=torch.ones(2, N))
    with pytest.raises(TypeError, match=r"^key_bias: got a float"):
        ck.prefix_attention_states(q, k, v, key_bias=0.5)


@pytest.mark.parametrize("recorded", [15, 16])
def test_a_program_takes_any_number_of_keys(recorded: int) -> None:
    class Faded(torch.nn.Module):
        def forward(self, key: Tensor, decay: Tensor) -> Tensor:
            return ck.prefix_attention_states(key.new_ones(2, 3, 4), key, key, every=3, decay=decay).out

    def inputs(length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 2, length, 4), torch.rand(1, 2, length) / 2 + 0.5

    sizes = ({2: torch.export.Dim.DYNAMIC},) * 2
    program = torch.export.export(Faded(), inputs(recorded), dynamic_shapes=sizes).module()
    for length in range(8, 20):
        given = inputs(length)
        torch.testing.assert_close(program(*given), Faded()(*given))
