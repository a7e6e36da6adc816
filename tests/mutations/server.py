"""A process that has imported torch and pytest once, and runs tests in forks of itself, because a new start takes long.

It reads one request per line, as JSON: `folder`, the tree whose tests run; `arguments` of pytest; `log`, the file for
printed text; and `limit` in seconds. It answers each request with a line: the exit code, or the negative number of a
signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
import torch
import torch._dynamo  # the tests use it, and its import takes longest


def answer(request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        run(**request)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: str, arguments: list[str], log: str, limit: int) -> None:
    """Run the tests in this process, and end it."""
    signal.alarm(limit)  # so that the default action of its signal ends the process
    os.chdir(folder)
    sys.path[:0] = [folder, os.path.join(folder, "python")]
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file contains no modules to import
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(answer(json.loads(line)), flush=True)
