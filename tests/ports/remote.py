"""A plugin of pytest that runs the native kernels on another machine, `-p tests.ports.remote`.

The command in CMAB_REMOTE, with the path of `server.py` appended, starts a Python on the other machine or under
emulation. This Python has torch, and this package with its extension. Definitions, oracles and all other parts of a
test run on this machine, so that tests take about as long as usual if the other machine is a hundred times slower. The
data that a kernel reads and writes are copied in both directions, with the memory around them.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import shlex
import subprocess
import sys
import threading
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

from . import server

SEPARATE = ("is_sole_owner", "remember")
"""Functions of the extension that run here, because they read Python's reference counts."""


class Remote(ModuleType):
    """The extension of the other machine, as a module; `calls` counts its functions' calls."""

    def __init__(self, command: list[str], here: ModuleType) -> None:
        super().__init__(here.__name__)
        self.here, self.calls, self._lock = here, Counter[str](), threading.Lock()
        self._process = subprocess.Popen([*command, server.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.machine = self._read()

    def __getattr__(self, name: str) -> Any:
        here = getattr(self.here, name)
        if name in SEPARATE or name.startswith("__"):
            return here
        return functools.partial(self._ask, name) if callable(here) else self._ask(name)

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        try:
            sent, tensors = server.pack((arguments, named), {})
        except OverflowError as error:
            pytest.skip(str(error))  # the error says that this number of bytes is too large to send
        except (RuntimeError, NotImplementedError):  # the extension must refuse a tensor without memory
            refused = getattr(self.here, name)(*arguments, **named)
            assert refused is None, f"{name} has taken a tensor without memory"
            return refused
        call = server.Call(name, sent, torch.get_num_threads(), os.environ.get("CMAB_KERNELS_ISA"))
        with self._lock:
            self.calls[name] += 1
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            reply = self._read()
        for (address, _), content in reply.changed.items():
            server.write(address, content)
        result, *_ = server.unpack(reply.result, tensors)
        if isinstance(result, Exception):
            raise result
        return result

    def _read(self) -> Any:
        try:
            return pickle.load(self._process.stdout)
        except EOFError as error:
            raise RuntimeError(
                f"the other machine's process has ended: {shlex.join(map(str, self._process.args))}"
            ) from error

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


_REMOTE = pytest.StashKey[Remote]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace the extension before `conftest.py` reads its instruction sets."""
    name = "cmab_kernels._C"
    remote = Remote(shlex.split(os.environ["CMAB_REMOTE"]), importlib.import_module(name))
    assert not [known for known in sys.modules if known.startswith("cmab_kernels.") and known.endswith(".native")], (
        "too late"
    )
    sys.modules[name] = early_config.stash[_REMOTE] = remote
    early_config.add_cleanup(remote.close)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    remote = config.stash[_REMOTE]
    terminalreporter.write_line(
        f"{sum(remote.calls.values())} native calls ran on {remote.machine}: {dict(remote.calls.most_common())}"
    )
