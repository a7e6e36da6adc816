"""Which attention modules of a model run this package's operators in a call, and why the others do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn


class ModuleExplanation(NamedTuple):
    """Whether the call of an attention module ran this package's operators, and why. `module` is its path in the
    model."""

    module: str
    kind: str
    fused: bool
    reason: str


class _Watch:
    """The notes of one `explain`: for each call of an attention module or of the attention function, the reason why
    torch's own code runs, or None."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(_attentions(model, "", set()))
        self.reasons: dict[str, list[str | None]] = {path: [] for path in self.modules}
        self.functions: dict[tuple[str, str], list[str | None]] = {}
        self._watched = {id(module): path for path, module in self.modules.items()}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._inside: list[nn.Module] = []

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, and note why torch's own code runs in it, or None."""
        if id(module) in self._watched:
            self.reasons[self._watched[id(module)]].append(_why_torch(module, *args, **kwargs))
        self._inside.append(module)
        try:
            return _uncompiled(module)(*args, **kwargs)
        finally:
            self._inside.pop()

    def note(self, why: str | None) -> None:
        """Note a call of the attention function, under the module that is running."""
        module = self._inside[-1] if self._inside else None
        if not hasattr(module, "why_torch"):
            place = self._paths.get(id(module), ""), type(module).__name__
            self.functions.setdefault(place, []).append(why)

    def rows(self, model: nn.Module) -> list[ModuleExplanation]:
        found = {
            (path, type(each).__name__): self.reasons[path] or [_why_not_called(model, path)]
            for path, each in self.modules.items()
        }
        for place, reasons in self.functions.items():
            found[place] = [*found.get(place, ()), *reasons]
        return [
            ModuleExplanation(*at, why is None, why or "the operators run")
            for at, each in found.items()
            for why in dict.fromkeys(each)
        ]


def _uncompiled(module: Any) -> Any:
    """Return the function that a call of the module runs without the compiler. The compiler would not trace the code
    that observes the parts of the module."""
    return getattr(module, "_orig_mod", module._call_impl)


_watch: ContextVar[_Watch | None] = ContextVar("cmab_kernels.explain", default=None)
_lock = threading.Lock()
_watches = 0
"""The number of running calls of `explain`, in all threads."""
_torchs_call = nn.Module.__call__


def explain_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[ModuleExplanation]:
    """Call the model, and return a row for each attention module in it, or several rows if its calls differed.

    Modules that call the attention function, `scaled_dot_product_attention` of `cmab_kernels.integrations`, have rows
    too. Compiled modules run uncompiled.
    """
    watch = _Watch(model)
    with _calls_seen():
        token = _watch.set(watch)
        try:
            model(*args, **kwargs)
        finally:
            _watch.reset(token)
    return watch.rows(model)


@contextmanager
def _calls_seen() -> Iterator[None]:
    """Let an `explain` in the same thread or task see calls of modules.

    No module is changed, because another thread may copy, pickle or explain the same module at the same time. Hooks
    would change the module, and with hooks torch and this package run other code.
    """
    global _watches, _torchs_call
    with _lock:
        if not _watches:
            _torchs_call = nn.Module.__call__
            nn.Module.__call__ = _seen  # type: ignore[method-assign]  # torch has no other way to see all calls without changing the modules
        _watches += 1
    try:
        yield
    finally:
        with _lock:
            _watches -= 1
            if not _watches:
                nn.Module.__call__ = _torchs_call  # type: ignore[method-assign]  # as it was


def _seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watch = _watch.get()
    return _torchs_call(module, *args, **kwargs) if watch is None else watch.call(module, args, kwargs)


def note(why: str | None) -> None:
    """Note for a running `explain` why torch's own code runs in a call of the attention function; None if the operator
    runs."""
    if _watches and not torch.compiler.is_compiling():
        watch = _watch.get()
        if watch is not None:
            watch.note(why)


def _attentions(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for each attention module and each layer with operators of its own, but not for those inside
    another."""
    if module in seen:
        return
    seen.add(module)
    if hasattr(module, "why_torch") or isinstance(module, nn.MultiheadAttention):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _attentions(child, f"{path}.{name}".lstrip("."), seen)


def _why_torch(module: Any, *args: Any, **kwargs: Any) -> str | None:
    if hasattr(module, "why_torch"):
        why: str | None = module.why_torch(*args, **kwargs)
        return why
    if type(module) is nn.MultiheadAttention:
        return "torch's own module: cmab_kernels.nn.replace_modules replaces it"
    return "a subclass of torch's module, which replace_modules leaves alone"


def _why_not_called(model: nn.Module, path: str) -> str:
    if hasattr(model.get_submodule(path), "forward_stream"):
        return "not called; its forward_stream or its steps may have run in its place"
    parent = model.get_submodule(path.rpartition(".")[0]) if path else None
    in_its_place = (
        ": torch's fused encoder layer ran in its place" if isinstance(parent, nn.TransformerEncoderLayer) else ""
    )
    return f"not called{in_its_place}"
