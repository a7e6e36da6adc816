"""What `make reproduce` trains. The numbers of steps are chosen so that the whole takes 60 to 80 minutes on two cores.

If an experiment does not set the steps, they are the task's own numbers for each system."""

from __future__ import annotations

from .jobs import Experiment

_STREAMS = ("continual-nystromformer", "continual-transformer", "nystromformer")

_SETS = ("intention", "attention", "transformer", "mlp")

_LETTERS = {"glyphs": "dejavu", "ways": 5, "turn": 45.0}

_BEFORE = {"model.residual": "input"}
"""The residual of the usual pre-norm layers. In the authors' code the residual goes to the normed rows instead."""

EXPERIMENTS = (
    # The slowest runs come first, so that no slow run is left alone at the end.
    Experiment(
        "functions", "gp-rbf", ("cmanp", "cmanp-and", "lbanp", "tnp-d", "cnp"), settings={"autoregressive": True}
    ),
    Experiment("functions, residual of the input", "gp-rbf", ("cmanp",), settings={"autoregressive": True} | _BEFORE),
    Experiment("functions, Matérn", "gp-matern", ("cmanp", "lbanp", "cnp")),
    Experiment("departures", "departures", ("cmhp", "thp")),
    Experiment("departures, latents alone", "departures", ("cmhp",), settings={"queries": "latents"}),
    Experiment("digits", "digits", ("cmanp", "lbanp", "cnp")),
    Experiment("wheel", "wheel", ("cmanp", "lbanp", "cnp")),
    Experiment("hawkes", "hawkes", ("cmhp", "thp")),
    Experiment("hawkes, latents alone", "hawkes", ("cmhp",), settings={"queries": "latents"}),
    Experiment("patches", "patches", _STREAMS),
    Experiment("patches, fixed landmarks", "patches", ("continual-nystromformer",), settings={"landmarks": "fixed"}),
    *(Experiment(task, task, _SETS) for task in ("kabsch", "sine", "target")),
    Experiment("outlier", "outlier", ("transformer", "informer", "sigma-informer")),
    # For digits, the nearest mean of the pixels is right more often than features learned from only six digits.
    Experiment("few shots", "few-shot", ("few-shot", "intention", "attention", "maml"), settings=_LETTERS),
    *(
        Experiment(f"few shots, {estimator}", "few-shot", ("few-shot",), settings=_LETTERS | {"estimator": estimator})
        for estimator in ("scatter", "kernel", "attention")
    ),
    *(
        Experiment(f"least squares, width {dim}", "least-squares", ("intention", "attention"), (0,), {"dim": dim})
        for dim in (4, 8, 16, 64)
    ),
)
