"""States of many partitions that are merged in a tree by the workers of a cluster or of a pool, without a process
group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from ..attention import AttentionState, merge_states
from ..intention import RidgeState, merge_ridge
from ..online import OnlineRidge
from ..runtime.checks import kind_of, mismatch


def reduce_states(client: Any, function: Callable[[Any], Any], partitions: Iterable[Any]) -> Any:
    """Return the state of all partitions, from a function that returns the state of one.

    The workers of `client` call `function` on each partition, and then merge neighbours in a tree: ceil(log2 P) levels
    for P partitions. A merge sends one state. Its size does not depend on the size of the partitions. The order of the
    partitions determines which ones are neighbours, so the result has the same bits for any number of workers.

    Args:
        client: a `dask.distributed.Client`, an executor of `concurrent.futures`, or another object whose
            `submit(function, *arguments)` returns a future. With Dask, futures stay on the workers: a worker fetches
            from another worker the state that it merges. With `concurrent.futures`, the states pass through the caller.
            function: takes a partition and returns an `AttentionState`, such as `CMABStack.encode`, a `RidgeState`, or
            an `OnlineRidge` that has read the partition. It runs without gradients. Other processes must be able to
            import or unpickle it.
        partitions: at least one. A partition is anything that `function` takes, such as a file's name, or a future of
            the client.

    Raises a `TypeError` if `client` has no `submit`, if `function` cannot be called, or if a result is not a state.
    Raises a `ValueError` if there are no partitions or if their states do not fit together. Errors of `function` are
    raised too.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> with ThreadPoolExecutor(2) as client:
    ...     read = lambda rows: cmab_kernels.OnlineRidge().fit(x[rows], y[rows])
    ...     model = cmab_kernels.distributed.reduce_states(client, read, [slice(0, 30), slice(30, 80), slice(80, 100)])
    >>> torch.allclose(model.coef_, cmab_kernels.OnlineRidge().fit(x, y).coef_, atol=1e-5)
    True
    """
    if not callable(getattr(client, "submit", None)):
        raise TypeError(
            mismatch("client", kind_of(client), "an object with a method submit, such as a dask.distributed.Client")
        )
    if not callable(function):
        raise TypeError(mismatch("function", kind_of(function), "a function of one partition"))
    futures = [client.submit(_state_of, function, partition) for partition in partitions]
    if not futures:
        raise ValueError(mismatch("partitions", "none", "at least one"))
    try:
        while len(futures) > 1:
            pairs = zip(futures[::2], futures[1::2], strict=False)
            left_over = futures[len(futures) // 2 * 2 :]
            futures = [client.submit(_union, _passed(one), _passed(other)) for one, other in pairs] + left_over
        return futures[0].result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _passed(future: Any) -> Any:
    """Return the object that a task takes as a future: Dask's workers resolve their futures, but an executor passes
    arguments unchanged."""
    return future.result() if isinstance(future, Future) else future


@torch.no_grad()
def _state_of(function: Callable[[Any], Any], partition: Any) -> Any:
    state = function(partition)
    if not isinstance(state, (AttentionState, RidgeState, OnlineRidge)):
        allowed = "a function that returns an AttentionState, a RidgeState or an OnlineRidge"
        raise TypeError(mismatch("function", f"{kind_of(state)} from it", allowed))
    return state


@torch.no_grad()
def _union(first: Any, second: Any) -> Any:
    """Return the merge of two states without changing them, because a worker may hold them for other tasks."""
    if isinstance(first, AttentionState):
        return merge_states(first, second)
    if isinstance(first, RidgeState):
        return merge_ridge(first, second)
    return copy.copy(first).merge(second)
