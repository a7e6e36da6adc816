"""What `make reproduce` trains. Steps are chosen so that the whole takes one to two hours on two cores; they are the tasks' own, by
system, where an experiment says nothing."""

from __future__ import annotations

from .jobs import Experiment

_STREAMS = ("continual-nystromformer", "continual-transformer", "nystromformer")

_SETS = ("intention", "attention", "transformer", "mlp")

_LETTERS = {"glyphs": "dejavu", "ways": 5, "turn": 45.0}

_BEFORE = {"model.residual": "input"}
"""The residual of the usual pre-norm layers, in place of the authors', which goes to the normed rows."""

EXPERIMENTS = (
    # The slowest first, so that at the end no process is left alone with one of them.
    Experiment("functions", "gp-rbf", ("cmanp", "cmanp-and", "lbanp", "tnp-d", "cnp"), settings={"autoregressive": True}),
    Experiment("functions, residual of the input", "gp-rbf", ("cmanp",), settings={"autoregressive": True} | _BEFORE),
    Experiment("functions, Matérn", "gp-matern", ("cmanp", "lbanp", "cnp")),
    Experiment("departures", "departures", ("cmhp", "thp")),
    Experiment("departures, latents alone", "departures", ("cmhp",), settings={"queries": "latents"}),
    Experiment("digits", "digits", ("cmanp", "lbanp", "cnp")),
    Experiment("digits, residual of the input", "digits", ("cmanp",), settings=_BEFORE),
    Experiment("wheel", "wheel", ("cmanp", "lbanp", "cnp")),
    Experiment("hawkes", "hawkes", ("cmhp", "thp")),
    Experiment("hawkes, latents alone", "hawkes", ("cmhp",), settings={"queries": "latents"}),
    Experiment("patches", "patches", _STREAMS),
    Experiment("patches, fixed landmarks", "patches", ("continual-nystromformer",), settings={"landmarks": "fixed"}),
    *(Experiment(task, task, _SETS) for task in ("kabsch", "sine", "target")),
    Experiment("outlier", "outlier", ("transformer", "informer", "sigma-informer")),
    # Of digits the nearest mean of the pixels tells more right than features that were learned from six of them.
    Experiment("few shots", "few-shot", ("few-shot", "intention", "attention"), settings=_LETTERS),
    *(
        Experiment(f"few shots, {estimator}", "few-shot", ("few-shot",), settings=_LETTERS | {"estimator": estimator})
        for estimator in ("scatter", "kernel", "attention")
    ),
    *(Experiment(f"least squares, width {dim}", "least-squares", ("intention", "attention"), (0,), {"dim": dim}) for dim in (4, 8, 16, 64)),
)
