"""Runs cases on every rank of process groups of several sizes: `python -m tests.distributed.ranks FOLDER LAUNCH...`.

The ranks are forks of one process, because otherwise most of the time would be spent on starting Python and importing
torch for each rank.
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
from torch import multiprocessing

LAUNCHES = {
    "two": (2, ["cases_merge", "cases_gradients", "cases_modules"]),
    "three": (3, ["cases_merge", "cases_gradients", "cases_modules"]),
    "four": (4, ["cases_levels"]),
    "compiled": (2, ["cases_compiled"]),
}
"""name -> the number of processes, and the modules whose cases they run"""


def cases(*modules: str) -> dict[str, Callable[[], None]]:
    """Return the cases of modules beside this file: their functions whose names begin with "case_"."""
    found = {}
    for name in modules:
        module = importlib.import_module(f"tests.distributed.{name}")
        found.update(
            {key.removeprefix("case_"): value for key, value in vars(module).items() if key.startswith("case_")}
        )
    return found


def run(rank: int, folder: Path, processes: int, modules: list[str]) -> None:
    """Run the cases on one rank, and write the outcome of each to FOLDER/RANK.json:
    "" for a case that passed, else its traceback.

    After the first failure, the ranks no longer agree on the next case, so they stop.
    """
    meeting = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=processes, timeout=timedelta(seconds=100)
    )
    outcomes: dict[str, str] = {}
    for name, case in cases(*modules).items():
        torch.manual_seed(0)
        try:
            case()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        if outcomes[name]:
            sys.exit(1)
    dist.destroy_process_group()


def main(folder: Path, launches: list[str]) -> None:
    # Otherwise the cases would import these modules on every rank.
    compilers = ("torch._dynamo", "torch._inductor.compile_fx") if "compiled" in launches else ()
    for name in (*compilers, "torch.distributed.fsdp"):
        importlib.import_module(name)
    for launch in launches:
        cases(*LAUNCHES[launch][1])
    for name in launches:
        processes, modules = LAUNCHES[name]
        (folder / name).mkdir()
        multiprocessing.start_processes(run, (folder / name, processes, modules), processes, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
