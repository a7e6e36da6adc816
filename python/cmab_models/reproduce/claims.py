"""The published claims that the results judge, with the papers' figures."""

from __future__ import annotations

from .judging import Claim, Verdict, compared
from .results import LOWER, Results, Side


def _better(text: str, source: str, ours: Side, theirs: Side, published: tuple[float, float] | None = None) -> Claim:
    """Return the claim that one side is better than another. `published` holds the paper's figures of both."""
    return Claim(text, source, lambda results: compared(results, ours, theirs), _told(published), (ours, theirs))


def _near(
    text: str,
    source: str,
    ours: Side,
    theirs: Side,
    published: tuple[float, float] | None = None,
    equal_seconds: bool = False,
) -> Claim:
    """Return the claim that one side is not worse than another by more than in the paper."""
    allowed = _behind(ours, published)
    told = _told(published) + (f": at most {allowed:g} worse" if allowed else "")
    return Claim(
        text, source, lambda results: compared(results, ours, theirs, allowed, equal_seconds), told, (ours, theirs)
    )


def _behind(side: Side, published: tuple[float, float] | None) -> float | None:
    """Return how much worse the first of two figures is: 0 if it is better, None if the figures are not known."""
    if published is None:
        return None
    ours, theirs = published
    return round(max(0.0, ours - theirs if side.score.startswith(LOWER) else theirs - ours), 6)


def _told(published: tuple[float, float] | None) -> str:
    return f"{published[0]:g} against {published[1]:g}" if published else "no published figures"


def _constant_memory(results: Results) -> Verdict:
    """Judge the claim that CMANP keeps less than one number per further point, from 10,000 points on. The claim is not
    judged if LBANP also does so."""
    grown = {system: _bytes_a_point(results, system) for system in ("cmanp", "lbanp")}
    told = (
        ", ".join(f"{system} {each:.1f}" for system, each in grown.items())
        + " bytes for each point beyond 10,000, where buffers are full; a float32 number has 4"
    )
    if grown["lbanp"] < 4:
        return Verdict(None, told)
    return Verdict(grown["cmanp"] < 4, told)


def _bytes_a_point(results: Results, system: str) -> float:
    """Return how much memory grows per point, from 10,000 points (or the largest context below) to the largest measured
    context."""
    costs = [(cost.points, cost.mebibytes) for cost in results.costs if cost.system == system]
    if len(costs) < 2 or costs[-1][0] < 10_000:
        raise KeyError("no large context was measured")
    least = max((cost for cost in costs[:-1] if cost[0] <= 10_000), key=lambda cost: cost[0])
    return (costs[-1][1] - least[1]) * 2**20 / (costs[-1][0] - least[0])


def _sides(experiment: str, score: str, *systems: str) -> tuple[Side, Side]:
    ours, theirs = systems
    return Side(experiment, ours, score), Side(experiment, theirs, score)


CMANP_PAPER = "Feng et al., ICML 2024 (arXiv 2305.14567)"
WORKSHOP = "Feng et al., 2023 (arXiv 2306.12599)"
NYSTROM = "Carreto Picón et al., 2024 (arXiv 2412.03214)"
INTENTION = "Garnelo and Czarnecki, 2023 (arXiv 2305.10203)"

FUNCTIONS = {
    "functions": {"cmanp": 1.24, "lbanp": 1.27, "tnp-d": 1.39, "cnp": 0.26, "cmanp-and": 1.48},
    "functions, Matérn": {"cmanp": 0.80, "lbanp": 0.85, "cnp": 0.04},
}
"""The paper's table of 1-D regression: log-likelihoods of functions with an RBF kernel and with a Matérn 5/2
kernel."""
WHEEL = {"0.7": (0.93, 1.11), "0.9": (1.56, 1.75), "0.95": (1.87, 1.65), "0.99": (9.04, 6.13), "0.995": (13.02, 8.76)}
"""The paper's regrets of CMANP and LBANP, in percent of those of a uniform policy."""

TRAINED_ON_ALL = (
    "no published figures; the model was trained on all targets as one block, as in the public code, and "
    "never on a single target"
)


def _functions(experiment: str, ours: str, theirs: str, near: bool = False) -> Claim:
    """Return a claim on functions. The name of the experiment names the kernel."""
    kernel = experiment.partition(", ")[2] or "RBF"
    relation = f"is as near to {theirs.upper()} as published" if near else f"is above {theirs.upper()}"
    published = (FUNCTIONS[experiment][ours], FUNCTIONS[experiment][theirs])
    sides = _sides(experiment, "log_likelihood", ours, theirs)
    return (_near if near else _better)(
        f"Functions ({kernel}): {ours.upper()} {relation}.", CMANP_PAPER, *sides, published
    )


def _blocks(text: str, smaller: str, larger: str) -> Claim:
    ours, theirs = (Side("functions", "cmanp-and", f"log_likelihood_{way}") for way in (smaller, larger))
    return _better(f"CMANP-AND: {text}", CMANP_PAPER, ours, theirs)._replace(published=TRAINED_ON_ALL)


def _wheel(delta: str, ours: float, theirs: float) -> Claim:
    relation = "as near to LBANP's as published" if ours > theirs else "below LBANP's"
    text = f"On wheels of radius {delta}, CMANP's regret is {relation}."
    return _near(text, CMANP_PAPER, *_sides("wheel", f"regret_{delta}", "cmanp", "lbanp"), (ours, theirs))


def _events(paper: bool) -> tuple[Claim, ...]:
    """Return the claims on events for the paper's CMHP, or for the CMHP whose queries hold the newest event."""
    variant = ", latents alone" if paper else ""
    what = "CMHP" if paper else "CMHP with the newest event in its queries (not in the paper)"
    return tuple(
        _near(
            f"{what} predicts {told} as well as THP.",
            WORKSHOP,
            Side(experiment + variant, "cmhp", score),
            Side(experiment, "thp", score),
        )._replace(is_published=paper)
        for experiment, score, told in (("hawkes", "time", "times"), ("departures", "mark", "real marks"))
    )


CLAIMS: tuple[Claim, ...] = (
    Claim("CMANP reads its context in constant memory.", CMANP_PAPER, _constant_memory),
    _functions("functions", "cmanp", "lbanp", near=True),
    _functions("functions", "cmanp", "cnp"),
    _functions("functions", "tnp-d", "lbanp"),
    _functions("functions", "cmanp-and", "cmanp"),
    _functions("functions, Matérn", "cmanp", "lbanp", near=True),
    _functions("functions, Matérn", "cmanp", "cnp"),
    _blocks("blocks of 5 targets give higher likelihoods than all at once.", "blocks_of_5", "at_once"),
    _blocks("targets one by one give higher likelihoods than blocks of 5.", "one_by_one", "blocks_of_5"),
    _near(
        "On images of seen classes, CMANP is near LBANP.",
        CMANP_PAPER,
        *_sides("digits", "log_likelihood_seen", "cmanp", "lbanp"),
    ),
    _better(
        "On images of seen classes, CMANP is above CNP.",
        CMANP_PAPER,
        *_sides("digits", "log_likelihood_seen", "cmanp", "cnp"),
    ),
    _better(
        "On images of unseen classes, CMANP is above CNP.",
        CMANP_PAPER,
        *_sides("digits", "log_likelihood_unseen", "cmanp", "cnp"),
    ),
    *(_wheel(delta, *regrets) for delta, regrets in WHEEL.items()),
    *_events(paper=True),
    *_events(paper=False),
    _near(
        "At equal CPU seconds, the continual Nyströmformer is as near to full attention as published.",
        NYSTROM,
        *_sides("patches", "streamed", "continual-nystromformer", "continual-transformer"),
        (0.9292, 0.9312),
        equal_seconds=True,
    ),
    _near(
        "The continual Nyströmformer is as near to a Nyströmformer that recomputes every window as published.",
        NYSTROM,
        *_sides("patches", "streamed", "continual-nystromformer", "nystromformer"),
        (0.9292, 0.9354),
    ),
    _better(
        "Fixed landmarks are less accurate than continual landmarks.",
        NYSTROM,
        Side("patches", "continual-nystromformer", "streamed"),
        Side("patches, fixed landmarks", "continual-nystromformer", "streamed"),
        (0.9292, 0.9076),
    ),
    _better(
        "Intention finds a rotation, scale and shift better than attention.",
        INTENTION,
        *_sides("kabsch", "mse", "intention", "attention"),
    ),
    _better(
        "Intention regresses sines better than attention.", INTENTION, *_sides("sine", "mse", "intention", "attention")
    ),
    _better(
        "Intention finds a target from distances better than attention.",
        INTENTION,
        *_sides("target", "mse", "intention", "attention"),
    ),
    _better(
        "Intention finds a target from distances better than a Transformer.",
        INTENTION,
        *_sides("target", "mse", "intention", "transformer"),
    ),
    *(
        _better(
            f"With few examples, least-squares classifiers are above {told}.",
            INTENTION,
            Side("few shots", "few-shot", "accuracy"),
            Side(experiment, system, "accuracy"),
            published,
        )
        for told, experiment, system, published in (
            ("attention", "few shots", "attention", (67.30, 54.26)),
            ("MAML", "few shots", "maml", (67.30, 63.15)),
            ("a softmax over the examples' classes", "few shots, attention", "few-shot", None),
        )
    ),
    *(
        _near(
            f"{name} finds outliers as well as a Transformer in equal CPU seconds.",
            INTENTION,
            *_sides("outlier", "accuracy", system, "transformer"),
            (published, 0.953),
            equal_seconds=True,
        )
        for name, system, published in (
            ("An Informer", "informer", 0.951),
            ("A sigma-Informer", "sigma-informer", 0.955),
        )
    ),
)
