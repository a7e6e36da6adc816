"""A photograph, completed while its pixels arrive: a guess of all others after each packet, and nothing kept but a state.

A CMANP learns from squares of other photographs what a few pixels say about the rest. Then the pixels of a cat arrive in random order, a
packet at a time: each is read into a state of constant size, from which the colours of pixels that have not come are predicted.
"""

import tempfile
import time
from pathlib import Path

import torch
from cmab_models.data.images import coordinates, photographs, values
from cmab_models.tasks import TASKS
from cmab_models.training import Run, train
from torch.utils._pytree import tree_leaves

PACKET = 8
"""Pixels that arrive at a time."""
SHOWN = (8, 32, 128, 512, 2048, 4096)
"""Numbers of pixels after which the guess is looked at."""


def main() -> None:
    task = TASKS["photographs"]().changed({"steps": 250, "functions": 8, "learning_rate": 5e-3})
    with tempfile.TemporaryDirectory() as folder:
        model, seconds = train(Run("cmanp", task, Path(folder)))
    print(f"trained for {task.steps} steps of {task.functions} squares in {seconds['cpu_seconds']:.0f} CPU seconds")

    image = photographs()["chelsea"][::4, ::4]  # every fourth pixel of a cat that was not trained on
    place, colour = coordinates(*image.shape[:2]).unsqueeze(0), values(image).unsqueeze(0)
    order = torch.randperm(place.shape[1], generator=torch.Generator().manual_seed(0))
    missing, arriving = order[: place.shape[1] // 3], order[place.shape[1] // 3 :]
    state, known, spent = None, 0, []
    with torch.no_grad():
        for packet in arriving[: SHOWN[-1]].split(PACKET):
            start = time.perf_counter()
            state = model.condition(place[:, packet], colour[:, packet], state)
            spent.append(time.perf_counter() - start)
            known += len(packet)
            if known in SHOWN:
                predicted = model.predict(state, place[:, missing])
                error = (predicted.mean - colour[:, missing]).square().mean().sqrt()
                likelihood = predicted.log_prob(colour[:, missing]).sum(-1).mean()
                size = sum(part.nbytes for part in tree_leaves(state))
                print(f"{known:>5} pixels: colours off by {error:.3f}, log-likelihood {likelihood:6.2f}; a state of {size:,} bytes")
        blind = (colour[:, missing] - colour[:, arriving].mean(1, keepdim=True)).square().mean().sqrt()
    print(f"one colour, the mean, for all: off by {blind:.3f}")
    print(f"a packet of {PACKET} pixels takes {1e6 * sorted(spent)[len(spent) // 2]:.0f} us, the first as the last")


if __name__ == "__main__":
    main()
