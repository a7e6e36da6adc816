"""A loss after every event: a model of a stream that learns from all lengths of its context at once.

Readings of a curve arrive one by one. From the readings so far, the model predicts the next. A few latents attend to
the readings. The state after each reading equals the state of a stream at that time, so one pass over a sequence gives
a prediction, and a loss, at every length. At the end, the stream is read one reading at a time, with the same
predictions. For comparison, a training step through these updates is timed too.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cmab_kernels import AttentionState, attention_state, prefix_attention_states

WIDTH, LATENTS, HEADS, LENGTH = 32, 8, 4, 40


class Forecaster(nn.Module):
    """Predicts the value of a curve at a place from readings (place, value) of it, by the state of latents that attend
    to them."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(HEADS, LATENTS, WIDTH // HEADS))
        self.embed = nn.Sequential(nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Sequential(nn.Linear(LATENTS * WIDTH + 1, 64), nn.GELU(), nn.Linear(64, 1))

    def keys(self, readings: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, N, D) of readings (B, N, 2)."""
        key, value = self.embed(readings).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return key, value

    def predict(self, out: Tensor, place: Tensor) -> Tensor:
        """The value at each place (B, T), from the states' out (B, H, T, L, E) before it."""
        return self.head(torch.cat([out.transpose(1, 2).flatten(2), place.unsqueeze(-1)], -1)).squeeze(-1)

    def forward(self, readings: Tensor) -> Tensor:
        """Predictions (B, N - 1) of every reading but the first, each from the readings before it."""
        states = prefix_attention_states(self.latents, *self.keys(readings[:, :-1]))
        return self.predict(states.out, readings[:, 1:, 0])

    def one_by_one(self, readings: Tensor) -> Tensor:
        """The same predictions, with an update of the state for each reading."""
        key, value = self.keys(readings[:, :-1])
        state: AttentionState | None = None
        outs = []
        for one_key, one_value in zip(key.split(1, dim=2), value.split(1, dim=2), strict=True):
            state = attention_state(self.latents, one_key, one_value, state=state)
            outs.append(state.out)
        return self.predict(torch.stack(outs, 2), readings[:, 1:, 0])


def curves(count: int) -> Tensor:
    """Readings (count, LENGTH, 2) of sines of random phase and frequency, at random places."""
    place = torch.rand(count, LENGTH) * 2 - 1
    phase, frequency = 6.3 * torch.rand(count, 1), 1 + 2 * torch.rand(count, 1)
    return torch.stack([place, torch.sin(frequency * place + phase)], -1)


def main() -> None:
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(301):
        readings = curves(32)
        errors = (model(readings) - readings[:, 1:, 1]).square()
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        if step % 100 == 0:
            early, late = errors[:, :3].mean().sqrt(), errors[:, -10:].mean().sqrt()
            print(f"step {step:>3}: error {early:.2f} after up to 3 readings, {late:.2f} after 30 or more")

    readings, state = curves(1), None
    with torch.no_grad():
        at_once = model(readings)
        for i in range(LENGTH - 1):
            state: AttentionState | None = attention_state(
                model.latents, *model.keys(readings[:, i : i + 1]), state=state
            )
            one = model.predict(state.out.unsqueeze(2), readings[:, i + 1 : i + 2, 0])
            assert torch.allclose(one[0], at_once[0, i], atol=1e-4)
    print(
        f"read one by one: the same {LENGTH - 1} predictions, from a state of {sum(part.nbytes for part in state):,} "
        "bytes"
    )

    readings = curves(32)
    one_pass, loop = (milliseconds_of_a_step(model, predict, readings) for predict in (model, model.one_by_one))
    print(f"a training step: {one_pass:.1f} ms in one pass, {loop:.1f} ms by {LENGTH - 1} updates")


def milliseconds_of_a_step(model: nn.Module, predict: Callable[[Tensor], Tensor], readings: Tensor) -> float:
    """The minimum time of ten gradients of all errors."""
    found = []
    for _ in range(10):
        model.zero_grad()
        start = time.perf_counter()
        (predict(readings) - readings[:, 1:, 1]).square().mean().backward()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


if __name__ == "__main__":
    main()
