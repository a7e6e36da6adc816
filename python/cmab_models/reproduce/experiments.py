"""What `make reproduce` trains. Steps are chosen so that the whole takes less than an hour on two cores, and so that a system and its
closest baseline take about the same CPU seconds on the machine of RESULTS.md; of functions and patches all take the same steps."""

from __future__ import annotations

from .jobs import Experiment

_STREAMS = ("continual-nystromformer", "continual-transformer", "nystromformer")

_SETS = ("intention", "attention", "transformer", "mlp")

_LETTERS = {"steps": 400, "glyphs": "dejavu", "ways": 5, "turn": 45.0}

EXPERIMENTS = (
    # The slowest first, so that at the end no process is left alone with one of them.
    Experiment(
        "functions",
        "gp-rbf",
        ("cmanp", "cmanp-and", "lbanp", "tnp-d", "cnp"),
        settings={"autoregressive": True},
        # At 3e-3 one seed of three of CMANP, and all of CMANP-AND, stayed where a model is that knows the mean of its context only.
        of_system={"cmanp": {"learning_rate": 1e-3}, "cmanp-and": {"learning_rate": 1e-3}},
    ),
    Experiment("digits", "digits", ("cmanp", "lbanp", "cnp"), settings={"steps": 4500}, of_system={"cnp": {"steps": 3600}}),
    Experiment("wheel", "wheel", ("cmanp", "lbanp", "cnp"), (0, 1), {"steps": 4000}, {"cnp": {"steps": 1800}}),
    Experiment("departures", "departures", ("cmhp", "thp"), settings={"steps": 5000}, of_system={"thp": {"steps": 6000}}),
    Experiment("hawkes", "hawkes", ("cmhp", "thp"), settings={"steps": 1100}, of_system={"thp": {"steps": 1200}}),
    Experiment("patches", "patches", _STREAMS, settings={"steps": 3000}),
    Experiment("patches, fixed landmarks", "patches", ("continual-nystromformer",), settings={"steps": 3000, "landmarks": "fixed"}),
    *(Experiment(task, task, _SETS, settings={"steps": 1500}) for task in ("kabsch", "sine")),
    Experiment("target", "target", _SETS, (0,), {"steps": 300}),
    Experiment("outlier", "outlier", ("transformer", "informer", "sigma-informer"), settings={"steps": 300}),
    *(
        # Of digits the nearest mean of the pixels tells more right than features that were learned from six of them.
        Experiment(f"few shots, {estimator}", "few-shot", ("few-shot",), settings=_LETTERS | {"estimator": estimator})
        for estimator in ("lssvm", "scatter", "kernel", "attention")
    ),
    *(
        Experiment(f"least squares, width {dim}", "least-squares", ("intention", "attention"), (0,), {"steps": 400, "dim": dim})
        for dim in (4, 8, 16, 64)
    ),
)
