"""Runs cases on every rank of a process group: `torchrun ... -m tests.distributed.ranks FOLDER cases_merge ...`.

Each rank writes the outcome of each case to FOLDER/RANK.json: "" for a case that passed, else its traceback. After the
first failure the ranks no longer agree on what comes next, so they stop.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def cases(*modules: str) -> dict[str, Callable[[], None]]:
    """Return the cases of modules beside this file: their functions whose names begin with "case_"."""
    found = {}
    for name in modules:
        module = importlib.import_module(f"tests.distributed.{name}")
        found.update({key.removeprefix("case_"): value for key, value in vars(module).items() if key.startswith("case_")})
    return found


def main(folder: Path, *modules: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    outcomes: dict[str, str] = {}
    for name, case in cases(*modules).items():
        torch.manual_seed(0)
        try:
            case()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))
        if outcomes[name]:
            sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
