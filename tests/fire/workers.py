"""Work in other processes and threads: `python -m tests.fire.workers fork|spawn|loader` exits with 0 if everything is
right."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import cmab_kernels as ck

THREADS = 4
SECONDS = 60
"""The time in seconds after which a child without an answer counts as hung."""


def results() -> list[Tensor]:
    """Return results of all kernels that share their work among threads, from inputs that are the same in every
    process.

    Torch's own operators run on one thread here, because in a forked child, operators of torch that share their work
    among threads hang. Our operators do not hang.
    """
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, rows, 16, generator=made) for rows in (64, 6000, 6000))
    inputs, rows = (
        torch.randn(2, 300, 64, generator=made),
        torch.randn(4, 16, 16, generator=made).softmax(-1).repeat(100, 1, 1),
    )
    weight, gram = torch.eye(64), rows @ rows.mT
    window = ck.continual_nystrom_init(key[:, :, :64], key[:, :, :64], value[:, :, :64], num_landmarks=8)
    key.requires_grad_()
    torch.set_num_threads(THREADS)
    attended = ck.latent_attention(query, key, value)
    with torch.no_grad():
        return [
            *torch.autograd.grad(attended, key, torch.ones_like(attended)),
            *ck.prefix_attention_states(query, key[:, :, :500], value[:, :, :500], every=50),
            ck.projected_attention_state(query[0], inputs, weight, weight).out,
            *ck.ridge_state(key, value),
            ck.intention(query, key, value, 0.1),
            ck.regularised_solve(gram, rows, 0.5).weight,
            ck.nystrom_attention(key, key, value, landmarks=(query[0, :, :16], query[0, :, :16])),
            ck.iterative_pinv(rows),
            ck.continual_nystrom_step(window, *(t[:, :, 64:256] for t in (key, key, value))).out,
            ck.attention_layer(inputs, weight, weight, weight, weight, num_heads=4),
            ck.feed_forward_layer(inputs, weight, weight, activation="relu"),
        ]


class Sets(Dataset[Any]):
    """A data set whose elements are computed by kernels, in the workers of a loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Tensor:
        return results()[at]  # on four threads; a loader gives its workers one thread


def _answer(sender: Any) -> None:
    sender.send([t.detach().numpy() for t in results()])


def child(method: str) -> bool:
    """Return whether a child process of this start method has the same bits; `TimeoutError` if it hangs."""
    mine = results()
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender,))
    process.start()
    try:
        if not receiver.poll(SECONDS):
            raise TimeoutError(f"the child of a {method} hangs")
        answer = receiver.recv()
    finally:
        process.kill()
        process.join()
    return all(torch.equal(ours.detach(), torch.from_numpy(theirs)) for ours, theirs in zip(mine, answer, strict=True))


def loader() -> bool:
    """Return whether a loader's workers, forked after this process used its threads, compute the same bits."""
    mine = results()
    made = DataLoader(Sets(), batch_size=None, num_workers=2, timeout=SECONDS)
    return all(torch.equal(ours.detach(), theirs) for ours, theirs in zip(mine, made, strict=False))


if __name__ == "__main__":
    sys.exit(not (loader() if sys.argv[1] == "loader" else child(sys.argv[1])))
