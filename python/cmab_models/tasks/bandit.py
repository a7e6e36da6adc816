"""The wheel bandit: an agent that updates its model with every reward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import mismatch

from ..choices import largest
from ..data import wheel
from ..neural_processes.base import Batch, NeuralProcess
from .base import BySystem, Task, seeded
from .functions import BOUNDED

DELTAS = (0.7, 0.9, 0.95, 0.99, 0.995)


@dataclass(frozen=True)
class WheelBandit(Task):
    """Wheels of radius delta ~ U(0, 1). A model learns from 512 contexts, with half of the rewards hidden, and 50
    targets.

    An agent takes the arm with the highest mean plus standard deviation, and reads the reward into the state, for
    `plays` contexts. Scores are the agent's regrets in percent of those of a uniform policy, as means over `seeds`.
    `regret_0.9` is the regret over all contexts at delta = 0.9. `simple_0.9` is the regret over the last quarter, at
    least one play. With a `memory`, the agent forgets older rewards. With a `later_delta`, the radius changes half-way.

    References: `uniform...`, 100 by definition; `first_arm...`, the regrets of a policy that always takes the arm that
    is best within the radius.
    """

    name: ClassVar[str] = "wheel"
    drawn_anywhere: ClassVar[bool] = True
    systems: ClassVar[tuple[str, ...]] = (
        *("cmanp", "lbanp", "lbanp-nd", "cnp", "tnp-a", "tnp-d", "tnp-nd", "inctnp"),
        *("canp", "np", "anp", "bnp", "banp", "eqtnp"),
    )

    of_system: ClassVar[BySystem] = {"cnp": {"steps": 1800}}  # its steps take four times as long
    steps: int = 4000
    wheels: int = 8
    """Wheels in a batch."""
    context: int = 512
    targets: int = 50
    plays: int = 2000
    seeds: int = 10
    memory: int = 0
    """The number of rewards that the agent remembers; 0 means all."""
    later_delta: float = 0.0
    """The radius after half of the plays; 0 means that the radius does not change."""

    def sizes(self, system: str) -> dict[str, Any]:
        if system == "inctnp" and self.memory:
            raise ValueError(mismatch("memory", self.memory, "0, which remembers all, as an inctnp cannot forget"))
        if system in BOUNDED:
            return {"dim_x": 2, "dim_y": wheel.ARMS}
        sizes = {"dim_x": 2, "dim_y": wheel.ARMS, "dim": 16, "num_heads": 1, "depth": 4}
        latents = {"num_latents": 8} if system in ("cmanp", "lbanp", "lbanp-nd") else {}
        return sizes | latents | ({"covariance": "low-rank"} if system in ("lbanp-nd", "tnp-nd") else {})

    def batch(self, generator: torch.Generator) -> Batch:
        delta = torch.rand(self.wheels, generator=generator)
        x, rewards, _ = wheel.draw(delta, self.context + self.targets, generator)
        seen = torch.rand(self.wheels, self.context, wheel.ARMS, generator=generator) > 0.5
        known = wheel.hidden(rewards[:, : self.context], seen, generator)
        return Batch(x[:, : self.context], known, x[:, self.context :], rewards[:, self.context :])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast("NeuralProcess", model).loss(batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._percent(self.regrets(model))

    def references(self) -> dict[str, float]:
        game = self._game(DELTAS, self.seeds)
        policies = {
            "uniform": self.uniform_regrets(),
            "first_arm": self._by_delta(_best_paid(game) - game.rewards[..., 0]),
        }
        return {
            f"{name}_{score}": value
            for name, regrets in policies.items()
            for score, value in self._percent(regrets).items()
        }

    def regrets(self, model: nn.Module) -> Tensor:
        """Return the regret (deltas, seeds, plays) of every play, for the radii in `DELTAS`."""
        plays = _played(model, self._game(DELTAS, self.seeds), self.memory)
        return self._by_delta(torch.stack([play.regret for play in plays], 1))

    def uniform_regrets(self) -> Tensor:
        """Return the expected regrets (deltas, seeds, plays) of a uniform policy for the same contexts."""
        game = self._game(DELTAS, self.seeds)
        return self._by_delta(_best_paid(game) - game.rewards.mean(2))

    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield these values after each play of one wheel of delta 0.95: its regret, the sum so far, and the time of
        the update in milliseconds."""
        total = 0.0
        for i, play in enumerate(_played(model, self._game((0.95,), 1), self.memory)):
            total += play.regret.item()
            yield {
                "plays": i + 1.0,
                "regret": play.regret.item(),
                "cumulative_regret": total,
                "update_ms": play.update_ms,
            }

    def _game(self, deltas: tuple[float, ...], seeds: int) -> wheel.Wheel:
        """Return the contexts of `seeds` wheels of each radius, one radius after the other."""
        delta = torch.tensor(deltas).repeat_interleave(seeds).unsqueeze(1).repeat(1, self.plays)
        if self.later_delta:
            delta[:, self.plays // 2 :] = self.later_delta
        return wheel.draw(delta, self.plays, seeded(1))

    def _by_delta(self, regrets: Tensor) -> Tensor:
        return regrets.unflatten(0, (len(DELTAS), self.seeds))

    def _percent(self, regrets: Tensor) -> dict[str, float]:
        """Return regrets in percent of the regrets of the uniform policy, by radius."""
        scores: dict[str, float] = {}
        uniform = self.uniform_regrets()
        for name, first in (("regret", 0), ("simple", self.plays - max(self.plays // 4, 1))):
            ours, theirs = (part[..., first:].mean((1, 2)) for part in (regrets, uniform))
            scores |= {
                f"{name}_{delta}": 100 * value for delta, value in zip(DELTAS, (ours / theirs).tolist(), strict=True)
            }
        return scores


class _Play(NamedTuple):
    regret: Tensor
    """(B,)"""
    update_ms: float


@torch.no_grad()
def _played(model: nn.Module, game: wheel.Wheel, memory: int) -> Iterator[_Play]:
    """Play all wheels at once. The first arm is random. Later arms have the highest mean plus standard deviation."""
    model, generator, device = cast("NeuralProcess", model), seeded(2), next(model.parameters()).device
    state, known = None, []
    for x, rewards, best in zip(game.x.split(1, 1), game.rewards.split(1, 1), game.best.split(1, 1), strict=True):
        if state is None:
            arm = torch.randint(wheel.ARMS, best.shape, generator=generator)
        else:
            predicted = model.predict(state, x.to(device))
            arm = largest((predicted.mean + predicted.stddev).view(rewards.shape)).cpu()
        seen = torch.arange(wheel.ARMS) == arm.unsqueeze(-1)
        known.append((x.to(device), wheel.hidden(rewards, seen, generator).to(device)))
        start = perf_counter()
        state = model.condition(*known[-1], state)
        if memory and len(known) > memory:
            state = model.forget(state, *known.pop(0))
        seconds = perf_counter() - start
        paid, chosen = (rewards.take_along_dim(which.unsqueeze(-1), 2).flatten() for which in (best, arm))
        yield _Play(paid - chosen, 1e3 * seconds)


def _best_paid(game: wheel.Wheel) -> Tensor:
    return game.rewards.take_along_dim(game.best.unsqueeze(2), 2).squeeze(2)
