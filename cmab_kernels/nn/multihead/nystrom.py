"""Nyström attention with the constructor, the weights and the forward of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...nystrom import (
    Landmarks,
    check_pinv,
    choose_landmarks,
    landmark_values_reference,
    logits,
    nystrom_attention,
)
from ...runtime.checks import as_autocast, as_they_are, check_count, mismatch
from ...runtime.dtypes import default_scale
from ..constructors import extending
from ..inputs import check_features
from ..parts import computed
from .matrix_free import NO_DROPOUT, MatrixFreeAttention
from .official import nystrom_weights
from .projections import no_extra_keys

if TYPE_CHECKING:
    from typing import Self

LANDMARKS = ("landmark_queries", "landmark_keys")


ONLY_TOKENS = "a window consists of tokens only, without extra keys"
"""The reason, in an error message, why the module has no extra keys."""


class NystromAttention(MatrixFreeAttention):
    """Attention through m landmarks instead of all pairs of queries and keys: O((L + N) m) time, and no L x N matrix.

    In each head, with landmarks q~, k~ (m, D) and softmax over each row,

        out = softmax(scale Q k~') pinv(softmax(scale q~ k~')) softmax(scale q~ K') V        scale = D ** -0.5

    Args:
        embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as torch's.
        dropout, add_bias_kv, add_zero_attn: only torch's defaults. Other values raise a `ValueError`, because the
            module forms no attention weights, and because landmarks represent tokens.
        num_landmarks: m.
        landmarks: "segments": q~ and k~ are the means of m segments of the queries and of the keys. So m <= min(L, N),
            and a result also depends on later tokens. "fixed": q~ and k~ are parameters `landmark_queries` and
            `landmark_keys` (H, m, D). They are None until `fit_landmarks` makes them or a `state_dict` supplies them.
        pinv: "iterative", "exact" or "shared"; see `cmab_kernels.nystrom_attention`.
        pinv_iterations: the number of iterations.
        conv_kernel_size: k, an odd number. It adds to each head a convolution of the values over k tokens, `conv`, with
            one kernel for each head. Values of ignored tokens count as 0. The number of queries must equal the number
            of keys. None: no convolution.

    The other parameters have torch's names. So a `state_dict` of `torch.nn.MultiheadAttention` loads as it is, and
    leaves fixed landmarks unchanged. `forward` is torch's, without `attn_mask` and `is_causal`: every landmark attends
    to all keys, so no key can be hidden from single queries. With `need_weights=True` (torch's default!) the returned
    weights are the matrix of the linear map from values to results. No other L x N matrix is ever formed. These weights
    may be negative, and they sum to 1 only as far as the pseudo-inverse has converged. A wrong shape, dtype or device
    raises a `ValueError` or `TypeError` that names the argument.

    L and N may differ, with two exceptions: with a convolution, and with a `key_padding_mask` and landmarks "segments",
    because there the mask marks queries as well as keys. Ignored queries are read as 0, even if they are NaN, and their
    results have no meaning.

    Source: Nyströmformer (Xiong et al., AAAI 2021). Fixed landmarks are from Continual Low-Rank Scaled Dot-product
    Attention (Carreto Picon et al.).

    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> ours = cmab_kernels.nn.NystromAttention(16, 2, batch_first=True, num_landmarks=8)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> tokens = torch.randn(1, 1000, 16)
    >>> ours(tokens, tokens, tokens, need_weights=False)[0].shape
    torch.Size([1, 1000, 16])
    """

    lacks = NO_DROPOUT | no_extra_keys(ONLY_TOKENS)
    why_no_masks = "every landmark attends to all tokens; use key_padding_mask to hide tokens from all queries"
    schemes: ClassVar[tuple[str, ...]] = ("segments", "fixed")
    landmark_queries: torch.nn.Parameter | None
    landmark_keys: torch.nn.Parameter | None

    @extending(MatrixFreeAttention)
    def __init__(
        self,
        *args: Any,
        num_landmarks: int,
        landmarks: str = "segments",
        pinv: str = "iterative",
        pinv_iterations: int = 6,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        num_landmarks = check_count("num_landmarks", num_landmarks)
        if landmarks not in self.schemes:
            raise ValueError(mismatch("landmarks", repr(landmarks), f"one of {', '.join(self.schemes)}"))
        check_pinv(pinv, pinv_iterations)
        if conv_kernel_size is not None and check_count("conv_kernel_size", conv_kernel_size) % 2 == 0:
            raise ValueError(
                mismatch(
                    "conv_kernel_size",
                    conv_kernel_size,
                    "an odd number, so that each token is at the centre of its kernel",
                )
            )
        super().__init__(*args, **kwargs)
        self.conv = None if conv_kernel_size is None else self._convolution(int(conv_kernel_size))
        self.num_landmarks = num_landmarks
        self.landmarks = landmarks
        self.pinv = pinv
        self.pinv_iterations = int(pinv_iterations)
        if landmarks == "fixed":
            for name in LANDMARKS:
                self.register_parameter(name, None)

    def _convolution(self, size: int) -> torch.nn.Conv2d:
        heads, like = self.num_heads, self._like
        options: dict[str, Any] = {
            "padding": (size // 2, 0),
            "bias": False,
            "groups": heads,
            "device": like.device,
            "dtype": like.dtype,
        }
        return torch.nn.Conv2d(heads, heads, (size, 1), **options)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Tensor], *, num_heads: int, num_landmarks: int, pinv_iterations: int = 6
    ) -> Self:
        """Return a module (`batch_first`, `pinv="shared"`) with the weights that published code has saved.

        `state_dict` is that of a `NystromformerAttention` or `NystromformerSelfAttention` of the package transformers,
        or of a `NystromAttention` of the package nystrom-attention. The dropout, norms and residuals of these modules
        are not included.
        If there is no output projection, as in `NystromformerSelfAttention`, the output projection of the new module is
        the identity.

        The results equal those of the published modules, up to rounding, for inputs without a mask whose length is a
        multiple of `num_landmarks`. If the length equals `num_landmarks`, transformers attends exactly, and the results
        differ. With masked tokens, the landmarks of transformers also average the masked tokens.
        For lengths that are not a multiple of `num_landmarks`, nystrom-attention puts zeros before
        the tokens.

        Raises a `ValueError` for the names of another module and for weights of another shape. In nystrom-attention,
        `heads * dim_head` must be `dim`.

        >>> from transformers.models.nystromformer import modeling_nystromformer, configuration_nystromformer
        >>> config = configuration_nystromformer.NystromformerConfig(
        ...     hidden_size=16, num_attention_heads=2, num_landmarks=4, segment_means_seq_len=32
        ... )
        >>> theirs = modeling_nystromformer.NystromformerSelfAttention(config).eval()
        >>> ours = cmab_kernels.nn.NystromAttention.from_official(theirs.state_dict(), num_heads=2, num_landmarks=4)
        >>> tokens = torch.randn(3, 32, 16)
        >>> torch.allclose(ours(tokens, tokens, tokens, need_weights=False)[0], theirs(tokens)[0], atol=1e-5)
        True
        """
        weights = nystrom_weights(state_dict)
        size = weights["conv.weight"].shape[2] if "conv.weight" in weights else None
        like = weights["out_proj.weight"]
        module = cls(
            like.shape[0],
            num_heads,
            batch_first=True,
            num_landmarks=num_landmarks,
            pinv="shared",
            pinv_iterations=pinv_iterations,
            conv_kernel_size=size,
            device=like.device,
            dtype=like.dtype,
        )
        module.load_state_dict(weights)
        return module

    @torch.no_grad()
    def fit_landmarks(self, tokens: Tensor, keys: Tensor | None = None, *, seed: int = 0) -> None:
        """Make the fixed landmarks of each head by k-means (scikit-learn's `MiniBatchKMeans`) on training tokens.

        `tokens` are inputs of the query projection, at least m in all. Their shape is (B, N, embed_dim) or (N, B,
        embed_dim), depending on `batch_first`, or (N, embed_dim). Without `keys`, for self-attention, the tokens are
        clustered once. Every head projects the centres to its q~ and its k~, so that q~ and k~ correspond. With `keys`
        of width kdim, for cross-attention, the projected queries and the projected keys of each head are clustered
        separately. On one machine, the same tokens, seed and number of threads give the same landmarks.

        The landmarks are new parameters: add them to an optimizer to fine-tune them. In a stack, fit the layers from
        first to last. Fit each layer on the outputs of the fine-tuned layers before it.

        If scikit-learn is missing, an `ImportError` is raised. A `ValueError` is raised for too few tokens, for tokens
        of another shape or with a NaN or infinity, and for a seed that is not an int from 0 to 2**32 - 1.
        """
        if self.landmarks != "fixed":
            raise ValueError(
                mismatch("landmarks", repr(self.landmarks), "'fixed', because only fixed landmarks can be fitted")
            )
        if keys is None and self.kdim != self.embed_dim:
            raise ValueError(
                mismatch(
                    "keys",
                    None,
                    f"a torch.Tensor, because kdim = {self.kdim} differs from embed_dim = {self.embed_dim}",
                )
            )
        if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**32:
            raise ValueError(mismatch("seed", repr(seed), "an int from 0 to 2**32 - 1"))
        for name, each, width in (("tokens", tokens, self.embed_dim), ("keys", keys, self.kdim)):
            if each is not None:
                check_features(name, each, "(B, N, C), (N, B, C) or (N, C)", (2, 3), width, self._like)
        own = computed(self)
        if keys is None:
            centres = _centres("tokens", tokens.flatten(0, -2), self.num_landmarks, seed)
            fitted = [own._project(part, centres)[0] for part in range(2)]
        else:
            fitted = [own._centres_of_heads("tokens", 0, tokens, seed), own._centres_of_heads("keys", 1, keys, seed)]
        with torch.inference_mode(False):  # a parameter that was made in inference mode could not be trained
            for name, landmarks in zip(LANDMARKS, fitted, strict=True):
                setattr(self, name, torch.nn.Parameter(landmarks.clone(memory_format=torch.contiguous_format)))

    def _centres_of_heads(self, name: str, part: int, tokens: Tensor, seed: int) -> Tensor:
        heads = self._project(part, tokens).transpose(0, 1).flatten(1, 2)
        return torch.stack([_centres(name, head, self.num_landmarks, seed) for head in heads])

    def _project_query(self, query: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the heads (B, H, L, D) of the query. With landmarks "segments", ignored queries count as 0."""
        if key_padding_mask is not None and self.landmarks != "fixed":
            ignore = key_padding_mask if self.batch_first or query.dim() == 2 else key_padding_mask.T
            if ignore.shape == query.shape[:-1]:  # otherwise the operator raises an error with the reason
                query = query.masked_fill(ignore.unsqueeze(-1), 0.0)
        return self._project(0, query)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = nystrom_attention(query, key, value, key_padding_mask=mask, **self._options())
        return out if self.conv is None else out + self._convolved(query, value, mask)

    def _convolved(self, query: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the convolution (B, H, N, E) of the values over tokens."""
        if query.shape[2] != value.shape[2]:
            raise ValueError(
                mismatch(
                    "value", f"{value.shape[2]} tokens", f"{query.shape[2]}, as many as query has, for the convolution"
                )
            )
        if mask is not None:
            value = value.masked_fill(mask[:, None, :, None], 0.0)
        assert self.conv is not None
        result: Tensor = self.conv(value)
        return result

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        options = self._options()
        query, key = as_autocast(query, key)
        with as_they_are(key.device):
            landmarks = choose_landmarks(query, key, options.get("num_landmarks"), options.get("landmarks"), mask)
            weights = _linear_map(
                query, key, landmarks, mask, check_pinv(self.pinv, self.pinv_iterations), self.pinv == "shared"
            )
            if self.conv is None:
                return weights
            unit = torch.eye(key.shape[2], dtype=weights.dtype, device=weights.device).expand(
                key.shape[0], self.num_heads, -1, -1
            )
            return weights + self._convolved(query, unit, mask)

    def _options(self) -> dict[str, Any]:
        """Return the operator's keyword arguments for the landmarks and the pseudo-inverse."""
        options: dict[str, Any] = {"pinv": self.pinv, "pinv_iterations": self.pinv_iterations}
        if self.landmarks != "fixed":
            return {"num_landmarks": self.num_landmarks, **options}
        if self.landmark_queries is None or self.landmark_keys is None:
            raise RuntimeError(
                "landmarks: got None, expected fitted landmarks; call fit_landmarks(tokens), or load a state_dict that "
                "has them"
            )
        return {"landmarks": (self.landmark_queries, self.landmark_keys), **options}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the landmarks if the `state_dict` has them.

        A `state_dict` of torch's module has no landmarks, and leaves the landmarks of this module unchanged.
        """
        own: tuple[str, ...] = tuple(name for name in LANDMARKS if name in self._parameters)  # not parametrized
        names = own if self.landmarks == "fixed" else ()
        saved = [name for name in names if prefix + name in state_dict]
        made = [name for name in saved if getattr(self, name) is None]
        like, errors = self._like, len(error_msgs)
        for name in made:
            setattr(self, name, torch.nn.Parameter(like.new_empty(self.num_heads, self.num_landmarks, self.head_dim)))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not saved:
            missing_keys[:] = [key for key in missing_keys if key not in {prefix + name for name in names}]
        elif len(saved) < len(names):
            error_msgs.append(mismatch(prefix + saved[0], "this entry alone", f"both of {', '.join(names)}"))
        if len(error_msgs) > errors:
            for name in made:
                setattr(self, name, None)


def _linear_map(
    query: Tensor, key: Tensor, landmarks: Landmarks, mask: Tensor | None, iterations: int, shared: bool
) -> Tensor:
    """Return the matrix (B, H, L, N) of the formula. It is a product of three matrices with inner dimension m."""
    scale, dtype = default_scale(key.shape[-1]), landmarks.keys.dtype
    near, far, absent, ignored = landmarks.queries, landmarks.keys, None, None
    if mask is not None:
        ignored = mask[:, None]
        key = key.masked_fill(ignored.unsqueeze(-1), 0.0)
    if landmarks.absent is not None:
        absent = landmarks.absent[:, None]
        near, far = (part.masked_fill(absent.unsqueeze(-1), 0.0) for part in (near, far))
    to_landmarks = _softmax(logits(query.to(dtype), far, scale), absent)
    to_keys = _softmax(logits(near.to(key.dtype).to(dtype), key.to(dtype), scale), ignored)
    values = landmark_values_reference(near, far, to_keys, absent, scale, iterations, shared=shared)
    return (to_landmarks @ values).to(query.dtype)


def _softmax(scores: Tensor, ignored: Tensor | None) -> Tensor:
    """Return the softmax over each row. Columns in `ignored` (B, 1, columns) are left out and get weight 0."""
    if ignored is None:
        return scores.softmax(-1)
    ignored = ignored.unsqueeze(-2)
    return scores.masked_fill(ignored, -torch.inf).softmax(-1).masked_fill(ignored, 0.0)


def _centres(name: str, rows: Tensor, number: int, seed: int) -> Tensor:
    """Return the centres (m, C) of m = `number` clusters of the rows (T, C), in the dtype of the rows.

    Error messages use `name` for the rows.
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise ImportError(
            "fit_landmarks clusters tokens with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    if rows.shape[0] < number:
        raise ValueError(mismatch(name, f"{rows.shape[0]} tokens", f"at least {number}, one for each landmark"))
    if not rows.isfinite().all():
        raise ValueError(mismatch(name, "a NaN or an infinity", "finite numbers"))
    clusters = MiniBatchKMeans(number, random_state=seed, n_init=3).fit(rows.double().cpu().numpy())
    return torch.from_numpy(clusters.cluster_centers_).to(rows)
