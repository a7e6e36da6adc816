"""The published claims that the results judge."""

from __future__ import annotations

from .judging import Claim, Verdict, above, compared, times_below, within
from .results import Results


def _blocks_help(results: Results) -> Verdict:
    """Judge that likelihoods of blocks that become context rise as blocks get smaller."""
    ways = ("at_once", "blocks_of_5", "one_by_one")
    found = [results.spread("functions", "cmanp", f"log_likelihood_{way}") for way in ways]
    means = [each.mean for each in found]
    told = ", ".join(f"{way.replace('_', ' ')} {each}" for way, each in zip(ways, found, strict=True))
    return Verdict(means[0] < means[1] <= means[2] and means[2] - means[0] >= 0.15, told)


def _fixed_landmarks(results: Results) -> Verdict:
    """Judge that fixed landmarks lose accuracy beside continual ones."""
    system = "continual-nystromformer"
    ours, theirs = (results.spread(name, system, "streamed") for name in ("patches", "patches, fixed landmarks"))
    return compared("continual landmarks", ours, "fixed", theirs)


def _streamed_is_whole(results: Results) -> Verdict:
    """Judge that streaming costs at most a point of accuracy."""
    whole, streamed = (results.spread("patches", "continual-nystromformer", score) for score in ("whole", "streamed"))
    return Verdict(abs(whole.mean - streamed.mean) <= 0.01, f"whole windows {whole}, streamed {streamed}")


def _few_shots(results: Results) -> Verdict:
    """Judge that an estimator in closed form classifies better than attention, if features were learned that carry over to new classes."""
    ours, theirs = (results.spread(f"few shots, {name}", "few-shot", "accuracy") for name in ("lssvm", "attention"))
    verdict, pixels = compared("LS-SVM", ours, "attention", theirs), results.tasks["few shots, lssvm"].references()["nearest mean"]
    if pixels > max(ours.mean, theirs.mean):
        return Verdict(None, f"{verdict.reason}, but the nearest mean of the pixels has {pixels:.3f}: what was learned does not carry over")
    return verdict


def _new_classes(results: Results) -> Verdict:
    """Judge that CMANP completes images of new classes better than CNP, and tell what needs no context."""
    verdict = above(results, "digits", "log_likelihood_unseen", "cmanp", "cnp")
    alone = results.tasks["digits"].references()["pixel_mean_unseen"]
    return Verdict(verdict.held, f"{verdict.reason}; the mean of each pixel, which needs no context, has {alone:.3f}")


def _regret(results: Results) -> Verdict:
    """Judge that the bandit's regret is far below that of a uniform policy, and near LBANP's."""
    ours, theirs = (results.spread("wheel", system, "regret_0.9") for system in ("cmanp", "lbanp"))
    return Verdict(
        ours.mean < 20 and ours.mean < theirs.mean + 5, f"percent of a uniform policy at delta 0.9: cmanp {ours}, lbanp {theirs}"
    )


def _departures(results: Results) -> Verdict:
    """Judge that CMHP predicts destinations as well as a Transformer, and tell what counting has."""
    verdict, counted = within(results, "departures", "mark", "cmhp", "thp", 0.06), results.tasks["departures"].references()["last_mark"]
    gain = results.spread("departures", "cmhp", "mark").mean - counted
    return Verdict(verdict.held, f"{verdict.reason}; counting what follows a mark has {counted:.3f}, {gain:.2f} less than cmhp")


def _constant_memory(results: Results) -> Verdict:
    """Judge that memory does not grow with the context, from 10,000 points on."""
    costs = {cost.points: cost.mebibytes for cost in results.costs if cost.system == "cmanp" and cost.points >= 10_000}
    if len(costs) < 2:
        raise KeyError("no large context was measured")
    (least, first), *_, (most, last) = costs.items()
    return Verdict(last - first <= 8, f"{first:.0f} MiB at {least:,} points, {last:.0f} MiB at {most:,}")


def _outliers(results: Results) -> Verdict:
    """Judge that Informers are as good as a Transformer, within two points."""
    systems = ("transformer", "informer", "sigma-informer")
    found = {system: results.spread("outlier", system, "accuracy").mean for system in systems}
    told = ", ".join(f"{system} {value:.3f}" for system, value in found.items())
    return Verdict(max(found["informer"], found["sigma-informer"]) >= found["transformer"] - 0.02, told)


CMANP_PAPER = "Feng et al., ICML 2024"
WORKSHOP = "Feng et al., 2023"
NYSTROM = "Carreto Picón et al., 2024"
INTENTION = "Garnelo and Czarnecki, 2023"

CLAIMS: tuple[Claim, ...] = (
    Claim("CMANP reads its context in constant memory.", CMANP_PAPER, _constant_memory),
    Claim(
        "On functions of a Gaussian process, CMANP comes within 0.25 of LBANP.",
        CMANP_PAPER,
        lambda r: within(r, "functions", "log_likelihood", "cmanp", "lbanp", 0.25),
    ),
    Claim(
        "TNP-D, which attends between all points, is above LBANP.",
        CMANP_PAPER,
        lambda r: above(r, "functions", "log_likelihood", "tnp-d", "lbanp"),
    ),
    Claim("CMANP is above CNP.", CMANP_PAPER, lambda r: above(r, "functions", "log_likelihood", "cmanp", "cnp")),
    Claim(
        "CMANP-AND is above CMANP.",
        CMANP_PAPER,
        lambda r: above(r, "functions", "log_likelihood", "cmanp-and", "cmanp"),
    ),
    Claim("Smaller autoregressive blocks give higher likelihoods.", CMANP_PAPER, _blocks_help),
    Claim(
        "Completing images, CMANP comes within 0.10 of LBANP on classes that it has seen.",
        CMANP_PAPER,
        lambda r: within(r, "digits", "log_likelihood_seen", "cmanp", "lbanp", 0.10),
    ),
    Claim(
        "Completing images, CMANP is above CNP on classes that it has not seen.",
        CMANP_PAPER,
        _new_classes,
    ),
    Claim("On the wheel, CMANP's regret is near LBANP's.", CMANP_PAPER, _regret),
    Claim(
        "CMHP predicts times as well as the Transformer Hawkes process, within 0.06.",
        WORKSHOP,
        lambda r: within(r, "hawkes", "time", "cmhp", "thp", 0.06),
    ),
    Claim("CMHP predicts marks as well, within 0.06, on real departures.", WORKSHOP, _departures),
    Claim("Streaming costs the continual Nyströmformer no accuracy.", NYSTROM, _streamed_is_whole),
    Claim(
        "It comes within two points of full attention.",
        NYSTROM,
        lambda r: within(r, "patches", "streamed", "continual-nystromformer", "continual-transformer", 0.02),
    ),
    Claim("Fixed landmarks lose accuracy beside continual ones.", NYSTROM, _fixed_landmarks),
    Claim(
        "Intention finds a rotation, scale and shift far better than attention.",
        INTENTION,
        lambda r: times_below(r, "kabsch", "mse", "intention", "attention", 100),
    ),
    Claim(
        "Intention regresses sines far better than attention.",
        INTENTION,
        lambda r: times_below(r, "sine", "mse", "intention", "attention", 50),
    ),
    Claim("With few examples, least-squares classifiers are above attention.", INTENTION, _few_shots),
    Claim("Informers find outliers as well as a Transformer.", INTENTION, _outliers),
)
