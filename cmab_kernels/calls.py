"""Which attention modules of a model run this package's operators in a call, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, NamedTuple

from torch import nn


class ModuleExplanation(NamedTuple):
    """Whether the call of an attention module, named by its path in the model, was fused, and the reason."""

    module: str
    kind: str
    fused: bool
    reason: str


def explain_calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[ModuleExplanation]:
    """Call the model, and return a row for each attention module inside, or several where its calls differed.

    Compiled modules inside run uncompiled: the compiler would trace past what watches their parts.
    """
    modules = dict(_attentions(model, "", set()))
    reasons: dict[str, list[str | None]] = {path: [] for path in modules}
    with ExitStack() as stack:
        for path, module in modules.items():
            stack.enter_context(_watched(module, reasons[path]))
        for module in model.modules():
            if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
                stack.enter_context(_watched(module, []))
        model(*args, **kwargs)
    rows = []
    for path, module in modules.items():
        found = dict.fromkeys(reasons[path] or [_why_not_called(model, path)])
        rows += [ModuleExplanation(path, type(module).__name__, why is None, why or "the operators run") for why in found]
    return rows


def _attentions(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for each attention module, and each layer with operators of its own, but for none inside another."""
    if module in seen:
        return
    seen.add(module)
    if hasattr(module, "why_torch") or isinstance(module, nn.MultiheadAttention):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _attentions(child, f"{path}.{name}".lstrip("."), seen)


class _Watch:
    """What `Module.__call__` runs for a module that calls of `explain` watch, in place of its `_call_impl`.

    There torch puts what `Module.compile` has made, and leaves it out of copies and pickles. A hook would make torch and this package run
    other code, and so would a `forward` of the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, module._compiled_call_impl
        self.records: list[list[str | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        why = _why_torch(self.module, *args, **kwargs)
        for record in self.records:
            record.append(why)
        return getattr(self.module, "_orig_mod", self.module._call_impl)(*args, **kwargs)


_watching = Lock()


@contextmanager
def _watched(module: nn.Module, record: list[str | None]) -> Iterator[None]:
    """Note for each call why torch's own code ran, or None. Of threads that watch one module, the last leaves it as it was."""
    with _watching:
        watch = module._compiled_call_impl
        if not isinstance(watch, _Watch):
            watch = module._compiled_call_impl = _Watch(module)
        watch.records = [*watch.records, record]
    try:
        yield
    finally:
        with _watching:
            watch.records = [each for each in watch.records if each is not record]
            if not watch.records and watch.before is None:
                del module._compiled_call_impl
            elif not watch.records:
                module._compiled_call_impl = watch.before


def _why_torch(module: Any, *args: Any, **kwargs: Any) -> str | None:
    if hasattr(module, "why_torch"):
        why: str | None = module.why_torch(*args, **kwargs)
        return why
    if type(module) is nn.MultiheadAttention:
        return "torch's own module: cmab_kernels.nn.replace_modules replaces it"
    return "a subclass of torch's module, which replace_modules leaves alone"


def _why_not_called(model: nn.Module, path: str) -> str:
    if hasattr(model.get_submodule(path), "forward_stream"):
        return "not called: if anything, its forward_stream or its steps ran in its place"
    parent = model.get_submodule(path.rpartition(".")[0]) if path else None
    in_its_place = ": torch's fused encoder layer ran in its place" if isinstance(parent, nn.TransformerEncoderLayer) else ""
    return f"not called{in_its_place}"
