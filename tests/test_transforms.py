"""Transforms of `torch.func` can be nested: second derivatives equal autograd's, also in maps and in batches of
tangents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import cmab_kernels as ck
from cmab_kernels.nn import CMAB, TransformerEncoderLayer

Q, K, V, W = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (8, 4)))
K1, ALPHA, SQUARES = K[:, :, :1], torch.tensor([[0.5, 2.0]], dtype=torch.float64), (K.mT @ K / 4).softmax(-1)
MASK, WEIGHTS = torch.tensor([[False, True, False]]), torch.tensor([[0.5, 0.0, 2.0]], dtype=torch.float64)
BLOCK = CMAB(4, 2, 2, dtype=torch.float64)
ENCODER = TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "attention": (lambda k: ck.latent_attention(Q, k, V), K),
    "projected": (lambda x: ck.projected_attention_state(Q, x, W, W).out, V[0, :1]),
    "prefixes": (lambda k: ck.prefix_attention_states(Q, k, V, every=2).out, K),
    "nystrom": (lambda k: ck.nystrom_attention(k, k, V, num_landmarks=2), K),
    "intention": (lambda k: ck.intention(Q, k, V, 0.3), K),
    "sums": (lambda k: ck.ridge_state(k, V).gram, K),
    "sigma": (lambda k: ck.sigma_intention(Q, k, V, 0.3), K),
    "dual": (lambda k: ck.intention(Q, k, V[:, :, :3], 0.3, key_padding_mask=MASK), K[:, :, :3]),
    "weighted dual": (lambda w: ck.intention(Q, K[:, :, :3], V[:, :, :3], 0.3, weights=w), WEIGHTS),
    "sigma of a dual": (lambda k: ck.sigma_intention(Q, k, V[:, :, :3], 0.3, weights=WEIGHTS), K[:, :, :3]),
    "step": (lambda k: ck.ridge_step(ck.empty_ridge(1, 2, 4, 4), k, V, 0.3).solution.weight, K),
    "solve": (lambda k: ck.regularised_solve(k.mT @ k, k.mT, 0.5).weight, K),
    "penalty": (lambda alpha: ck.solve_ridge(ck.ridge_state(K, V), alpha).weight, ALPHA),
    "inverse": (lambda x: ck.iterative_pinv(x, 3), SQUARES),
    "window": (lambda k: ck.continual_attention_step(ck.continual_attention_init(k, k, k), K1, K1, K1).out, K),
    "attention layer": (lambda x: ck.attention_layer(x[0], W[:4], W[4:], W[:4], W[4:], num_heads=2), Q),
    "layer": (lambda x: ck.feed_forward_layer(x, W, W[:4]), Q),
    "encoder": (lambda x: ENCODER(x), V[0]),
    "block": (lambda x: BLOCK(x, Q[0, 0]), V[0]),
}


FEW = [
    "attention",
    "projected",
    "prefixes",
    "nystrom",
    "intention",
    "solve",
    "inverse",
    "window",
    "attention layer",
    "layer",
]
"""One call of each operator set, for tests that take long: the other calls consist of the same operators."""
FEW_OR_THOROUGH = [*FEW, *(pytest.param(name, marks=pytest.mark.thorough) for name in CALLS if name not in FEW)]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * max(1.0, float(theirs.detach().abs().max())))


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name: str) -> None:
    call, at = CALLS[name]
    hessian = torch.autograd.functional.hessian(lambda x: call(x).sin().sum(), at).reshape(at.numel(), -1)

    def slope(x: Tensor) -> Tensor:
        return grad(lambda y: call(y).sin().sum())(x)

    close(jacrev(slope)(at).reshape(at.numel(), -1), hessian)
    both = vmap(grad(lambda x: slope(x).sum()))(torch.stack([at, at]))
    close(both, hessian.sum(0).view_as(at).expand(2, *at.shape))


@pytest.mark.parametrize("name", CALLS)
def test_a_map_of_nothing(name: str) -> None:
    """Results and gradients of an empty map have the shapes of one element, but contain no element."""
    call, at = CALLS[name]
    nothing = at[None][:0]
    assert vmap(call)(nothing).shape == (0, *call(at).shape)
    assert vmap(grad(lambda x: call(x).sin().sum()))(nothing).shape == nothing.shape


def test_a_map_of_no_masks() -> None:
    """Segments without a token are mapped, too; with one head, they need no copy."""
    nothing, k = torch.zeros(0, 1, 5, dtype=torch.bool), K[:, :1]
    assert vmap(lambda mask: ck.nystrom_attention(k, k, k, 2, key_padding_mask=mask))(nothing).shape == (0, *k.shape)


def test_a_map_of_no_offsets() -> None:
    """Offsets are not read, whether they are mapped or not. A gradient that is not mapped is an empty sum."""
    offsets, nothing = torch.tensor([[0, 2, 5]])[:0], K[None][:0]

    def packed(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> Tensor:
        return ck.latent_attention(query[0], key, key, cu_seqlens=cu_seqlens)

    for dims, keys in ((None, K), (0, nothing)):
        assert vmap(packed, in_dims=(None, dims, 0))(Q, keys, offsets).shape == (0, 2, 2, 3, 4)
    q = Q.clone().requires_grad_()
    vmap(packed, in_dims=(None, 0, 0))(q, nothing, offsets).sum().backward()
    assert q.grad is not None and q.grad.eq(0).all()


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_directions(name: str) -> None:
    """`is_grads_batched` and the vectorised jacobians of autograd pass them in this way."""
    call, at = CALLS[name]
    x = at.clone().requires_grad_()
    y = call(x)
    directions = torch.randn(3, *y.shape, dtype=y.dtype)
    (batched,) = torch.autograd.grad(y, x, directions, retain_graph=True, is_grads_batched=True)
    close(batched, torch.stack([torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in directions]))


@pytest.mark.parametrize("name", CALLS)
def test_a_pull_back_after_its_transform(name: str) -> None:
    """The call gets tensors of a finished `vjp`, whose memory a kernel could not read."""
    call, at = CALLS[name]
    out, pull_back = vjp(call, at)
    direction = torch.randn_like(out)
    x = at.clone().requires_grad_()
    (right,) = torch.autograd.grad(call(x), x, direction)
    close(pull_back(direction)[0], right)
    with torch.no_grad():
        close(pull_back(direction)[0], right)
    slopes = vmap(pull_back)(torch.stack([direction, 2 * direction]))[0]
    close(slopes, torch.stack([right, 2 * right]))


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode(name: str) -> None:
    """Derivatives of first and second order equal those of reverse mode, whatever implementation is requested."""
    call, at = CALLS[name]
    direction = torch.randn_like(at)
    theirs = torch.autograd.functional.jvp(call, at, direction)[1]
    close(jvp(call, (at,), (direction,))[1], theirs)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(call(forward_ad.make_dual(at, direction))).tangent, theirs)
    close(jacfwd(call)(at), jacrev(call)(at))
    close(
        hessian(lambda x: call(x).sin().sum())(at), torch.autograd.functional.hessian(lambda x: call(x).sin().sum(), at)
    )


def test_what_forward_mode_refuses() -> None:
    """The backward pass of an outside call is that of a kernel, without a derivative; no other implementation replaces
    it."""
    k = K.clone().requires_grad_()
    out = ck.latent_attention(Q, k, V, impl="native")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        torch.autograd.grad(out, k, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
    with pytest.raises(ValueError, match=r"^impl: got 'nonsense'"):
        jvp(lambda k: ck.latent_attention(Q, k, V, impl="nonsense"), (K,), (K,))


OF_SCALE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda c: ck.latent_attention(Q, K, V, scale=c),
    "state": lambda c: ck.attention_state(Q, K, V, scale=c).lse,
    "removal": lambda c: ck.remove_from_state(ck.attention_state(Q, K, V), Q, K, V, scale=c).state.out,
    "projected": lambda c: ck.projected_attention_state(Q, V[0, :1], W, W, scale=c).out,
    "prefixes": lambda c: ck.prefix_attention_states(Q, K, V, scale=c).out,
    "nystrom": lambda c: ck.nystrom_attention(K, K, V, num_landmarks=2, scale=c),
    "sigma": lambda c: ck.sigma_intention(Q, K, V, 0.3, scale=c),
    "attention layer": lambda c: ck.attention_layer(Q[0], W[:4], W[4:], W[:4], W[4:], num_heads=2, scale=c),
}
"""Operators as functions of their scale, a constant."""


def _of_a_dual(call: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(at, torch.ones_like(at)))


HALF = torch.tensor(0.5)
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "jvp": lambda call: jvp(call, (HALF,), (HALF,)),
    "jacfwd": lambda call: jacfwd(call)(HALF),
    "a dual tensor": lambda call: _of_a_dual(call, HALF),
    "a dual one computed from": lambda call: _of_a_dual(lambda c: call(2 * c), HALF),
    "vmap": lambda call: vmap(call)(torch.stack([HALF, HALF])),
    "gradient": lambda call: grad(lambda c: call(c).sum())(HALF),
    "gradient within a gradient": lambda call: grad(lambda c: grad(lambda x: x * call(c).sum())(HALF))(HALF),
    "gradient within forward mode": lambda call: jvp(
        lambda c: grad(lambda x: x * call(c).sum())(HALF), (HALF,), (HALF,)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OF_SCALE)
def test_a_scale_that_is_no_constant_is_refused(name: str, transform: str) -> None:
    """A scale that is not a constant raises an error. Otherwise its derivative would silently be 0."""
    with pytest.raises(TypeError, match=r"^scale: got .*multiply the query by a scale that is learned"):
        TRANSFORMS[transform](OF_SCALE[name])


@pytest.mark.parametrize("name", OF_SCALE)
def test_a_constant_scale_beside_a_transform(name: str) -> None:
    """A scale may be a tensor of one number if no transform made this tensor, even if other arguments are
    transformed."""
    call = OF_SCALE[name]
    right = call(HALF)
    close(right, call(0.5))  # type: ignore[arg-type]  # a tensor of one number is taken for one
    close(jvp(lambda x: x * call(HALF), (HALF.double(),), (HALF.double(),))[1], 0.5 * right)
    close(vmap(lambda x: x * call(HALF))(HALF.double()[None])[0], 0.5 * right)


STACK, COUNT = torch.randn(3, 1, 3, 3, 3, dtype=torch.float64), torch.full((1, 3), 9)
SYSTEMS = STACK @ STACK.mT + torch.eye(3)
OF_SYSTEMS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "solve": (lambda gram: ck.regularised_solve(gram, STACK[0], 0.5).weight, SYSTEMS),
    "inverse": (lambda gram: ck.regularised_inverse(gram, 0.5), SYSTEMS),
    "penalty": (
        lambda alpha: ck.solve_ridge(ck.RidgeState(SYSTEMS[0], STACK[0], COUNT), alpha).weight,
        SYSTEMS[..., 0, 0],
    ),
}


@pytest.mark.parametrize("name", OF_SYSTEMS)
def test_a_map_of_solves_in_forward_mode(name: str) -> None:
    """Right-hand sides that are not mapped have the number of dimensions and the sizes that vectors would have: all
    sizes here are 3."""
    call, at = OF_SYSTEMS[name]
    right = torch.stack([jvp(call, (each,), (each,))[1] for each in at])
    close(jvp(vmap(call), (at,), (at,))[1], right)
    close(vmap(jacfwd(call))(at), torch.stack([jacrev(call)(each) for each in at]))
    close(jacfwd(vmap(call))(at), jacrev(vmap(call))(at))

    def total(x: Tensor) -> Tensor:
        return vmap(call)(x).sin().sum()

    close(hessian(total)(at), torch.autograd.functional.hessian(total, at))


def test_a_solve_in_forward_mode_reads_one_triangle() -> None:
    gram, slope, rhs = 3 * torch.eye(4).double() + 0.5, torch.randn(4, 4).double(), torch.randn(4, 2).double()
    slope = slope + slope.mT

    def solved(matrix: Tensor) -> Tensor:
        return ck.regularised_solve(matrix, rhs, 0.1).weight

    spoilt = gram.tril() + torch.full_like(gram, torch.nan).triu(1)
    for result, expected in zip(*(jvp(solved, (each,), (slope,)) for each in (spoilt, gram)), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", FEW_OR_THOROUGH)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, from folding constants
def test_graphs(name: str) -> None:
    """`linearize` and `make_fx` record a call: the graph depends on no number with which the call was recorded."""
    function, x = CALLS[name]
    close(linearize(function, x)[1](x), jvp(function, (x,), (x,))[1])
    close(make_fx(function)(x)(x.flip(-1)), function(x.flip(-1)))


@pytest.mark.parametrize("name", FEW_OR_THOROUGH)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, from its attention under vmap
def test_compiled_transforms(name: str) -> None:
    """Gradients and maps that are taken within a compiled region."""
    call, at = CALLS[name]

    def slope(x: Tensor) -> Tensor:
        return grad(lambda y: call(y).sin().sum())(x)

    def both(x: Tensor, several: Tensor) -> tuple[Tensor, Tensor]:
        return slope(x), vmap(slope)(several)

    one, several = torch.compile(both, backend="eager")(at, torch.stack([at, 2 * at]))
    close(one, slope(at))
    close(several, torch.stack([slope(at), slope(2 * at)]))


SQUARE = torch.randn(8, 4, dtype=torch.float64)
TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: ck.latent_attention(x, x, x),
    "prefixes": lambda x: ck.prefix_attention_states(x, x, x, every=2).out,
    "nystrom": lambda x: ck.nystrom_attention(x, x, x, landmarks=(x[0], x[0])),
    "intention": lambda x: ck.intention(x, x, x, 0.3, form="primal"),
    "dual": lambda x: ck.intention(x, x, x, 0.3, form="dual", weights=x[:, 0, :, 0].square()),
    "sums": lambda x: ck.ridge_state(x, x).moment,
    "solve": lambda x: ck.regularised_solve(x.mT @ x, x.mT @ x, 0.5).weight,
    "projected": lambda x: ck.projected_attention_state(x, x[:, 0], SQUARE, SQUARE).out,
    "attention layer": lambda x: ck.attention_layer(x[0], *[x[0, 0, :4]] * 4, num_heads=2, context=x[0]),
    "layer": lambda x: ck.feed_forward_layer(x[0], x[0, 0, :4], x[0, 0, :4], activation="gelu"),
}


@pytest.mark.parametrize("name", TWICE)
def test_one_tensor_as_two_arguments(name: str) -> None:
    """The solve is compiled into one graph, and its gradient is the sum of those of its places."""
    call, x = TWICE[name], torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    ours, right = torch.compile(call, backend="eager", fullgraph=True)(x), call(x)
    close(ours, right)
    close(*(torch.autograd.grad(result.sin().sum(), x)[0] for result in (ours, right)))
