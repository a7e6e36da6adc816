"""Programs in separate processes that need not import torch: forks of a process that has imported it.

A new process takes two to four seconds to import torch and this package, and most test programs take less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import torch, cmab_kernels"
LIMIT = 120
"""The largest number of seconds that a program may take; then a signal ends it."""

_SERVER = """
import json, os, runpy, signal, sys, traceback

def run(request):
    for stream, name in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
    signal.alarm(LIMIT)
    sys.argv = request["arguments"]
    code = 0
    try:
        if request["program"]:
            exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
        elif request["arguments"][0].endswith(".py"):
            runpy.run_path(request["arguments"][0], run_name="__main__")
        else:
            runpy.run_module(request["arguments"][0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
        if code is True:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """A process that has run the statements `first`, and runs programs in forks of itself."""

    def __init__(self, first: str = IMPORTS) -> None:
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]),
            "OMP_NUM_THREADS": "1",
        }
        self._first = first

    def __enter__(self) -> Forks:
        command = [sys.executable, "-c", f"{self._first}\nLIMIT = {LIMIT}\n{_SERVER}"]
        self._server = subprocess.Popen(
            command, env=self._environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate()

    def run(
        self, scratch: Path, arguments: Sequence[str] = ("",), program: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, or the file or module that the first argument names, in the root of the checkout. The printed
        text is kept in the folder `scratch`."""
        out, err = scratch / "stdout", scratch / "stderr"
        request = {"program": program, "arguments": list(arguments), "out": str(out), "err": str(err)}
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())
