"""`python -m cmab_models.reproduce`: train everything, and write RESULTS.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..cli import positive
from ..pictures import context
from ..presets import PRESETS
from ..training import Run
from . import openings
from .experiments import EXPERIMENTS
from .pictures import drawn
from .report import write
from .results import Results
from .runner import finished, run_all

PAGE = Path(__file__).parents[1] / "RESULTS.md"
NAMES = [each.name for each in EXPERIMENTS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_models.reproduce", description=__doc__)
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"which to run (default: all): {'; '.join(NAMES)}"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/reproduce"),
        help="where runs are kept; finished ones are not run again",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=2,
        help="processes that run together, with one thread each (default: 2)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="train with these settings of each task: paper has the published protocol"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: cpu)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="run only this share of all steps, to try the command (default: 1)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the page to write (default: RESULTS.md of the package; in FOLDER with EXPERIMENT, --share or --preset)",
    )
    parser.add_argument(
        "--confirm", action="store_true", help="do not train; accept results if the first steps of changed code agree"
    )
    asked = parser.parse_args()
    if asked.confirm:
        sys.exit("\n".join(openings.confirm(PAGE.with_suffix(".json"), print)) or 0)
    if unknown := [name for name in asked.experiments if name not in NAMES]:
        parser.error(f"there is no experiment {unknown[0]!r}")
    chosen = [each for each in EXPERIMENTS if each.name in (asked.experiments or NAMES)]
    folder = asked.folder / asked.preset if asked.preset else asked.folder
    by_experiment = {
        each.name: [_shortened(run, asked.share) for run in each.runs(folder, asked.preset, asked.device)]
        for each in chosen
    }
    runs = [run for each in by_experiment.values() for run in each]
    try:
        failed = _run(runs, asked.workers)
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; the same command continues from here\n")
    whole = asked.share == 1.0 and not asked.experiments and not asked.preset
    page = asked.output or (PAGE if whole else folder / "RESULTS.md")
    costs = context.measured(sizes=context.SIZES if asked.share == 1.0 else context.SIZES[:2])
    results = Results(by_experiment, costs)
    write(
        page,
        results,
        drawn(by_experiment, costs, page.parent / "pictures_of_results"),
        failed,
        asked.share,
        asked.preset,
    )
    if page == PAGE:
        openings.record(page.with_suffix(".json"), print)
    print(f"wrote {page}")
    sys.exit(1 if failed else 0)


def _shortened(run: Run, share: float) -> Run:
    if share == 1.0:
        return run
    return replace(
        run,
        task=run.task.changed({"steps": max(1, round(share * run.task.steps))}),
        folder=run.folder / f"share-{share:g}",
    )


def _run(runs: Sequence[Run], workers: int) -> list[Run]:
    """Finish all runs, with a bar of the steps that are done."""
    from tqdm import tqdm

    with tqdm(total=len(runs), unit="run") as bar:
        bar.update(sum(finished(run) is not None for run in runs))

        def report(run: Run, code: int) -> None:
            bar.update()
            if code:
                bar.write(f"{run.system} on {run.task.name}, seed {run.seed}: failed, see {run.folder / 'log.txt'}")

        return run_all(runs, workers, report)


if __name__ == "__main__":
    main()
