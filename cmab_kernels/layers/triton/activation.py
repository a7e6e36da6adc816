# mypy: disable-error-code="no-untyped-def"
"""The activations of feed-forward layers and their gradients, without branches that would divide a warp."""

import math

import triton
import triton.language as tl

from ...attention.triton.forward import LOG2_E

# With z = |x| / sqrt(2): exp(-z^2) t P(t) is the probability that a standard normal variable lies beyond |x|, where t =
# 1 / (1 + k z). t P(t), the Chebyshev interpolant of csrc/linear/activation.h, is erfcx(z) / 2 to 2.4e-8 (k = 0.3) or
# 8e-17 (k = 0.4). Highest powers come first.
_FLOAT32 = tl.constexpr(
    (
        *(-0.06524640777339215, 0.24528579903929723, -0.2616573281539325, 0.2806231010873495, -0.05235607054831211),
        *(0.10978355742411859, 0.07352270954208108, 0.08545707812926312, 0.08458755130411702),
    )
)
_FLOAT64 = tl.constexpr(
    (
        *(
            0.002885639474020734,
            -0.03346095212311818,
            0.1778367057722489,
            -0.5702730857664103,
            1.2196892698619723,
            -1.8095227994221288,
        ),
        *(
            1.8650996091155583,
            -1.2797872151112215,
            0.4949462881697768,
            0.008332636453890525,
            -0.16559097090774405,
            0.14752023983993967,
        ),
        *(-0.0695568984098986, 0.01818667115681459, -0.01919181240963361, -0.005438254987083792, 0.008809994636845054),
        *(
            0.03343202745031182,
            0.06083917600755816,
            0.0857570237676877,
            0.1038108737432861,
            0.11283791698127764,
            0.11283791670605052,
        ),
    )
)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit
def _normal(x):
    """The probability that a standard normal variable is below x, and its density. Small values keep their digits."""
    SCALE: tl.constexpr = 0.4 if x.dtype == tl.float64 else 0.3
    FACTORS: tl.constexpr = _FLOAT64 if x.dtype == tl.float64 else _FLOAT32
    COUNT: tl.constexpr = 23 if x.dtype == tl.float64 else 9
    z = tl.abs(x) * tl.full([1, 1], _ROOT_HALF, x.dtype)
    decay = tl.exp2(z * z * tl.full([1, 1], -LOG2_E, x.dtype))
    t = 1 / (1 + z * tl.full([1, 1], SCALE, x.dtype))
    tail = tl.zeros_like(x)
    for i in tl.static_range(COUNT):
        tail = tail * t + tl.full([1, 1], FACTORS[i], x.dtype)
    tail *= t * decay
    return tl.where(x < 0, tail, 1 - tail), decay * tl.full([1, 1], _DENSITY, x.dtype)


@triton.jit
def activated(features, gates, GATED: tl.constexpr, RELU: tl.constexpr):
    """The activation of a tile; without gates, `gates` are the features."""
    result = tl.where(gates < 0, 0.0, gates) if RELU else gates * _normal(gates)[0]
    return features * result if GATED else result


@triton.jit
def slopes(dact, features, gates, GATED: tl.constexpr, RELU: tl.constexpr):
    """The gradients of a tile of hidden features, and of their gates."""
    dfeatures = dact
    if RELU:
        dgates = tl.where(gates > 0, dact, 0.0)
    else:
        below, density = _normal(gates)
        dgates = dact * (below + tl.where(density == 0, 0.0, gates * density))  # gates may be infinite there
        if GATED:
            dfeatures = dact * gates * below
            dgates *= features
    return dfeatures, dgates
