"""The baselines of Intention: a Transformer with linear attention, a stack of neural processes, a neural process, and
MAML."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..encoder import attended
from ..neural_processes.parts import perceptron
from .base import Regressor
from .stacks import Stack


class LinearAttention(nn.Module):
    """Attention without a softmax: each head gives q (k^T v) / (N sqrt(d)) for N keys of width d.

    The arguments and results are those of `torch.nn.MultiheadAttention`, batch first and without weights.
    """

    batch_first = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        projected = (self.query(query), self.key(key), self.value(value))
        q, k, v = (rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for rows in projected)
        read = q @ (k.mT @ v) / (max(k.shape[-2], 1) * k.shape[-1] ** 0.5)
        return self.out(read.transpose(1, 2).flatten(2)), None


class Pooled(nn.Module):
    """A conditional neural process: the mean over the points of a perceptron of (key, value); then a perceptron of
    (query, mean). Without a point the mean is 0.

    The arguments and results of `forward` are those of `torch.nn.MultiheadAttention`, batch first and without weights.
    """

    batch_first = True

    def __init__(self, dim_key: int, dim_value: int, dim_out: int, dim: int, depth: int) -> None:
        super().__init__()
        self.point = perceptron(dim_key + dim_value, dim, dim, depth)
        self.answer = perceptron(dim_key + dim, dim, dim_out, depth)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        points = self.point(torch.cat([key, value], -1))
        mean = points.sum(1, keepdim=True) / max(points.shape[1], 1)
        return self.answer(torch.cat([query, mean.expand(-1, query.shape[1], -1)], -1)), None


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's pre-norm encoder layer, batch first and without dropout, with another module in place of attention."""

    def __init__(self, attention: nn.Module, dim: int, num_heads: int, ff_dim: int) -> None:
        super().__init__(dim, num_heads, ff_dim, dropout=0.0, batch_first=True, norm_first=True)
        self.self_attn = attention  # type: ignore[assignment]  # a module with the arguments of torch's

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        normed = self.norm1(src)
        src = src + attended(self.self_attn, normed, normed, normed)
        return src + self._ff_block(self.norm2(src))


class LinTransformer(Stack):
    """A Transformer with linear attention, Q (K^T V) without a softmax, in place of every attention. The arguments are
    those of `Informer`.

    Intention tends to linear attention as its penalty grows. Source: Exploring the Space of Key-Value-Query Models with
    Intention (Garnelo and Czarnecki), where this baseline is called Lin-Transformer. Here Q (K^T V) is divided by the
    number of keys and by sqrt(dim / num_heads).

    >>> model = cmab_models.LinTransformer(dim_key=3, dim_value=3, dim_out=3, dim=16)
    >>> model(torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3)).shape
    torch.Size([2, 4, 3])
    """

    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        return EncoderLayer(LinearAttention(dim, num_heads), dim, num_heads, ff_dim)

    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        return LinearAttention(dim, num_heads)


class NPFormer(Stack):
    """A Transformer with a conditional neural process in place of every attention: a perceptron of each query and of a
    mean over all keys with their values. It has no heads; the arguments are those of `Informer`, and `num_heads` is not
    used.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki), where this baseline is
    called NP-former.

    >>> model = cmab_models.NPFormer(dim_key=3, dim_value=3, dim_out=3, dim=16)
    >>> model(torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3)).shape
    torch.Size([2, 4, 3])
    """

    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        return EncoderLayer(Pooled(dim, dim, dim, dim, 2), dim, num_heads, ff_dim)

    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        return Pooled(dim, dim, dim, dim, 2)


class NPRegressor(Regressor):
    """A conditional neural process as a regressor: a perceptron of the query and of a mean over all points.

    It is trained by the squared error, and gives no distribution; `CNP` has the likelihood. Source: Conditional Neural
    Processes (Garnelo et al., ICML 2018).

    Args:
        dim_key: columns of queries and keys.
        dim_value, dim_out: columns of values and of answers.
        dim: width of all features.
        depth: the number of linear layers of each of the two perceptrons.

    >>> model = cmab_models.NPRegressor(dim_key=1, dim_value=1, dim_out=1)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def __init__(self, dim_key: int, dim_value: int, dim_out: int, dim: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.dim_key, self.dim_value = dim_key, dim_value
        self.process = Pooled(dim_key, dim_value, dim_out, dim, depth)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        answer: Tensor = self.process(query, key, value)[0]
        return answer


class MAML(Regressor):
    """A perceptron that takes `inner_steps` steps of gradient descent on the points, and then answers the queries.
    Training passes gradients through these steps.

    The steps reduce the mean squared error or, if values are classes, the mean cross-entropy. Answers are then scores.

    Answers are as wide as values, because the perceptron maps queries as it maps keys. The steps change copies of the
    weights, so a hook or an adapter on a layer is not called. Source: Model-Agnostic Meta-Learning for Fast Adaptation
    of Deep Networks (Finn et al., ICML 2017). The defaults are those of its regression of sines.

    Args:
        dim_key: columns of queries and keys.
        dim_value: columns of values and of answers.
        dim: width of the hidden layers.
        depth: the number of linear layers.
        inner_steps: the number of gradient steps.
        inner_rate: the rate of these steps.
        classes: whether values are classes as 0 and 1, such as the rows of an identity matrix.

    >>> model = cmab_models.MAML(dim_key=1, dim_value=1)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def __init__(
        self,
        dim_key: int,
        dim_value: int,
        dim: int = 40,
        depth: int = 3,
        inner_steps: int = 1,
        inner_rate: float = 0.01,
        classes: bool = False,
    ) -> None:
        super().__init__()
        self.dim_key, self.dim_value, self.inner_steps, self.inner_rate = dim_key, dim_value, inner_steps, inner_rate
        self.classes = classes
        self.network = perceptron(dim_key, dim, dim_value, depth)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layers = [layer for layer in self.network if isinstance(layer, nn.Linear)]
        weights = [layer.weight.expand(len(key), -1, -1) for layer in layers]
        biases = [layer.bias.expand(len(key), 1, -1) for layer in layers]
        for _ in range(self.inner_steps):
            # The gradient is written out: autograd alone would need gradients where a caller has switched them off.
            rows = _rows(key, weights, biases)
            if self.classes:
                gradient = (rows[-1].softmax(-1) - value) / max(value.shape[1], 1)
            else:
                gradient = 2 * (rows[-1] - value) / max(value[:1].numel(), 1)
            for i in reversed(range(len(weights))):
                earlier = gradient @ weights[i] * (rows[i] > 0)
                weights[i] = weights[i] - self.inner_rate * (gradient.mT @ rows[i])
                biases[i] = biases[i] - self.inner_rate * gradient.sum(1, keepdim=True)
                gradient = earlier
        return _rows(query, weights, biases)[-1]


def _rows(inputs: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Return the inputs of each linear layer of perceptrons, one a batch element, and the outputs of the last."""
    rows = [inputs]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        outputs = rows[-1] @ weight.mT + bias
        rows.append(F.relu(outputs) if i + 1 < len(weights) else outputs)
    return rows
