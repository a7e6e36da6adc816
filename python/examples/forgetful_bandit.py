"""A bandit that updates on every reward, and forgets old rewards: the best arm of its machines changes half-way.

A CMANP learns from random machines what a few pulls say about the arms. Then two agents play new machines. After every
pull, the reward is added to a state of constant size. One of the agents also removes the reward of sixty pulls ago,
without reading the others again. When the arms change, the agent that forgets finds the new best arm; the other agent
still relies on old rewards.
"""

import time

import torch
from cmab_models import CMANP
from cmab_models.neural_processes import Batch
from torch import Tensor

ARMS, NOISE, PULLS, MEMORY, MACHINES = 4, 0.2, 400, 60, 16
PLACES = torch.eye(ARMS)
"""An arm as the model reads it: one of four points."""


def machines(count: int, pulls: int) -> tuple[Tensor, Tensor]:
    """Arms (count, pulls, ARMS) and rewards (count, pulls, 1) of machines with random payouts, pulled at random."""
    mean, arm = torch.rand(count, ARMS), torch.randint(ARMS, (count, pulls))
    return PLACES[arm], (mean.gather(1, arm) + NOISE * torch.randn(count, pulls)).unsqueeze(-1)


def trained(steps: int) -> CMANP:
    """A model that was trained on machines after one pull, and after any number of pulls up to a few more than are
    remembered."""
    sizes = {"dim": 16, "num_latents": 8, "num_heads": 1, "depth": 2, "embedding_depth": 2}
    # With the authors' residual, the model does not learn this task in this number of steps.
    model = CMANP(ARMS, 1, **sizes, bound_std=True, residual="input")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        known = int(torch.randint(1, MEMORY + 20, ()))
        x, y = machines(32, known + 16)
        optimizer.zero_grad()
        model.loss(Batch(x[:, :known], y[:, :known], x[:, known:], y[:, known:])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def play(model: CMANP, means: Tensor, forgets: bool) -> tuple[Tensor, float]:
    """Play machines whose mean payouts (PULLS, MACHINES, ARMS) may change; return the regrets (PULLS,) and the seconds
    of an update."""
    state = model.condition(torch.zeros(MACHINES, 0, ARMS), torch.zeros(MACHINES, 0, 1))
    known, regrets, spent = [], [], []
    for mean in means:
        predicted = model.predict(state, PLACES.expand(MACHINES, -1, -1))
        arm = (predicted.mean + 0.3 * predicted.stddev * torch.randn_like(predicted.mean)).argmax(1)
        reward = mean.gather(1, arm) + NOISE * torch.randn(MACHINES, 1)
        regrets.append((mean.max(1).values - mean.gather(1, arm).squeeze(1)).mean())
        known.append((PLACES[arm], reward.unsqueeze(-1)))
        start = time.perf_counter()
        state = model.condition(*known[-1], state)
        spent.append(time.perf_counter() - start)
        if forgets and len(known) > MEMORY:
            state = model.forget(state, *known[-1 - MEMORY])
    return torch.stack(regrets), sorted(spent)[PULLS // 2]


def main() -> None:
    torch.manual_seed(0)
    model = trained(400)
    means = torch.rand(2, MACHINES, ARMS).repeat_interleave(PULLS // 2, 0)  # other payouts in the second half
    late = slice(PULLS // 2 + MEMORY, None)
    print(f"regret of a pull at random: {(means.max(2).values - means.mean(2)).mean():.3f}")
    for forgets in (False, True):
        regrets, seconds = play(model, means, forgets)
        print(
            f"{'forgets after ' + str(MEMORY) if forgets else 'forgets nothing':>17}: regret "
            f"{regrets[: PULLS // 2].mean():.3f} "
            f"before the change, {regrets[late].mean():.3f} long after it; an update takes {1e6 * seconds:.0f} us"
        )


if __name__ == "__main__":
    main()
