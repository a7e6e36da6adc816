"""`python -m cmab_models.reproduce.scaling`: the width of features that least squares needs, over the number of
variables.

The paper on Intention poses the question in this form. A width does if the error of a trained model is at most a share
of the error of the mean answer. The widths are tried in order, up to the first that does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli import positive
from ..pictures import needed as picture
from ..pictures import save
from ..presets import known
from ..tasks import TASKS
from ..training import Run
from .runner import finished, run_all

TASK = "least-squares"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
VARIABLES = (1, 2, 4, 8)
SYSTEMS = ("intention", "intention-module", "attention", "transformer", "lin-transformer")

Needed = dict[str, dict[int, "int | None"]]


def needed(
    systems: Iterable[str],
    variables: Sequence[int],
    folder: Path,
    *,
    widths: Sequence[int] = WIDTHS,
    share: float = 0.05,
    seed: int = 0,
    workers: int = 2,
    settings: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> Needed:
    """Return the first of the widths that does, by system and number of variables; None if none does.

    `settings` are settings of the task. Runs are kept in `folder`; those that are finished are not run again. A run
    that fails counts as a width that does not do.
    """
    found: Needed = {system: dict.fromkeys(variables) for system in systems}
    for width in widths:
        runs = {
            (system, number): _run(system, number, width, folder, seed, settings or {})
            for system, by_number in found.items()
            for number, smaller in by_number.items()
            if smaller is None
        }
        run_all(list(runs.values()), workers, lambda run, code: None)
        for (system, number), run in runs.items():
            error, bound = _error(run), share * run.task.references()["mean"]
            report(f"{system}, {number} variables, width {width}: error {error:.3g}, at most {bound:.3g} does")
            if error <= bound:
                found[system][number] = width
    return found


def _run(system: str, variables: int, width: int, folder: Path, seed: int, settings: Mapping[str, Any]) -> Run:
    task = TASKS[TASK].for_system(system).changed({"variables": variables, **settings})
    # One head, because the number of heads divides the width.
    model = {"dim": width} | ({"num_heads": 1} if "num_heads" in known(system) else {})
    return Run(system, task, folder / f"{system}-{variables}-{width}-{seed}", seed, model_settings=model)


def _error(run: Run) -> float:
    record = finished(run)
    return float("inf") if record is None else float(record["scores"]["mse"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_models.reproduce.scaling", description=__doc__)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"(default: {' '.join(SYSTEMS)})")
    parser.add_argument("--variables", type=int, nargs="+", default=VARIABLES, metavar="N", help="(default: 1 2 4 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="D", help="widths to try, in order")
    parser.add_argument("--share", type=float, default=0.05, help="of the error of the mean answer (default: 0.05)")
    parser.add_argument("--steps", type=int, help="of each training (default: the task's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=positive, default=2, help="processes side by side, of one thread each")
    parser.add_argument("--folder", type=Path, default=Path("runs/scaling"), help="where runs and the result are kept")
    asked = parser.parse_args(arguments)
    systems = asked.systems or SYSTEMS
    if unknown := [system for system in systems if system not in TASKS[TASK].systems]:
        parser.error(f"SYSTEM: got {unknown[0]}, expected one of {', '.join(TASKS[TASK].systems)}")
    try:
        found = needed(
            systems,
            asked.variables,
            asked.folder,
            widths=asked.widths,
            share=asked.share,
            seed=asked.seed,
            workers=asked.workers,
            settings={} if asked.steps is None else {"steps": asked.steps},
        )
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; the same command goes on from here\n")
    (asked.folder / "needed.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save(lambda: picture.figure(found, max(asked.widths)), asked.folder / "needed.png")
    print(f"wrote {asked.folder / 'needed.json'} and needed.png")


if __name__ == "__main__":
    main()
