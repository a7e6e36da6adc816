"""The methods that scikit-learn requires of an estimator; they do not need scikit-learn."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from ..runtime.checks import mismatch

if TYPE_CHECKING:
    from typing import Self


class Interface:
    """The methods that scikit-learn's pipelines, searches and `clone` call."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor. An unknown name raises a `ValueError`."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"Invalid parameter {name!r} for estimator {self!r}. Valid parameters are: {sorted(known)!r}."
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = (
            f"{name}={value!r}" for name, value in self.get_params().items() if not _is(value, defaults[name].default)
        )
        return f"{type(self).__name__}({', '.join(changed)})"

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose what `predict` returns: "default", "pandas" or "polars". None changes nothing.

        The argument has scikit-learn's name, so that the last step of a pipeline is set like the other steps; this
        estimator only predicts, and transforms nothing. Predictions (N,) become a series, and predictions (N, E) become
        a data frame. Its columns have the names of the targets, or else "y", or "y0" to "y{E-1}". With pandas, they
        have the index of X. Other results are arrays or tensors as before. Raises a `ValueError` for another name.
        """
        if transform not in (None, "default", "pandas", "polars"):
            raise ValueError(mismatch("transform", repr(transform), "'default', 'pandas', 'polars' or None"))
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}  # scikit-learn's name: `clone` copies this attribute
        return self

    def get_metadata_routing(self) -> Any:
        """Return a `MetadataRequest` of scikit-learn that says which methods ask for `sample_weight`.

        scikit-learn uses it for metadata routing.
        """
        from sklearn.utils.metadata_routing import MetadataRequest

        request = getattr(self, "_metadata_request", None)  # scikit-learn's name: `clone` copies this attribute
        if request is None:
            request = MetadataRequest(owner=type(self).__name__)
            for method in ("fit", "partial_fit", "score"):
                getattr(request, method).add_request(param="sample_weight", alias=None)
        if not request.predict.requests:  # also true if an earlier version pickled the request
            request.predict.add_request(param="return_std", alias=None)
        return copy.deepcopy(request)

    def set_fit_request(self, *, sample_weight: bool | str | None) -> Self:
        """Say whether a search or a pipeline passes `sample_weight` to `fit`.

        True and False mean yes and no. With None, a given weight is an error. A string is another name for the weight.
        """
        return self._ask("fit", sample_weight=sample_weight)

    def set_partial_fit_request(self, *, sample_weight: bool | str | None) -> Self:
        """Do the same as `set_fit_request`, for `partial_fit`."""
        return self._ask("partial_fit", sample_weight=sample_weight)

    def set_predict_request(self, *, return_std: bool | str | None) -> Self:
        """Do the same as `set_fit_request`, for the argument `return_std` of `predict`."""
        return self._ask("predict", return_std=return_std)

    def set_score_request(self, *, sample_weight: bool | str | None) -> Self:
        """Do the same as `set_fit_request`, for `score`."""
        return self._ask("score", sample_weight=sample_weight)

    def _ask(self, method: str, **aliases: bool | str | None) -> Self:
        request = self.get_metadata_routing()
        for argument, alias in aliases.items():
            getattr(request, method).add_request(param=argument, alias=alias)
        self._metadata_request = request
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        target = TargetTags(required=True, multi_output=True)
        return Tags(
            estimator_type="regressor",
            target_tags=target,
            regressor_tags=RegressorTags(),
            input_tags=InputTags(sparse=True),
        )


def _is(value: Any, default: Any) -> bool:
    """Return whether a parameter equals its default. An array never does."""
    return not getattr(value, "shape", ()) and bool(value == default)
