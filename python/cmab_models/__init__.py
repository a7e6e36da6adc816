"""The systems of the papers on which `cmab_kernels` is based, with the baselines to which their numbers are compared.

The package uses only the public API of `cmab_kernels`. The models of `neural_processes` predict functions from points,
those of `point_processes` predict events, those of `streams` classify windows of tokens, and those of `regressors`
answer queries from keys and values. `tasks` holds data and scores. `data` holds the sources of the data. `presets`
holds settings of three sizes. `training` trains with Lightning and records results.
"""

import importlib.util

import torch

if _missing := [
    package for package in ("huggingface_hub", "safetensors", "tqdm") if importlib.util.find_spec(package) is None
]:
    # With this `name`, `python -m` prints the error in one line, without a traceback.
    raise ImportError(f'cmab_models: it needs {", ".join(_missing)}; pip install "cmab-kernels[models]"', name=__name__)

from .data.frames import FrameEvents, events_from_frame
from .fields import Field, fit_field
from .labelled_streams import StreamReader, fit_streams
from .neural_processes import (
    ANP,
    BANP,
    BNP,
    CANP,
    CMANP,
    CMANPAND,
    CNP,
    EQTNP,
    LBANP,
    LBANPND,
    NP,
    TNPA,
    TNPD,
    TNPND,
    IncTNP,
    NeuralProcess,
)
from .neural_processes.cnp import Total
from .neural_processes.inctnp import Cache
from .neural_processes.points import Points
from .point_processes import (
    CMHP,
    THP,
    CMHPState,
    Events,
    PointProcess,
    THPState,
    event_scores,
    trivial_event_scores,
)
from .regressors import (
    MAML,
    MLP,
    Attention,
    FewShot,
    Informer,
    Intention,
    IntentionModule,
    LinTransformer,
    NPFormer,
    NPRegressor,
    SigmaInformer,
    Transformer,
)
from .streams import ContinualNystromformer, ContinualTransformer, Nystromformer, StreamState

# Registered like the states in cmab_kernels.
torch.serialization.add_safe_globals([Cache, CMHPState, Points, StreamState, THPState, Total])

__all__ = [
    "ANP",
    "BANP",
    "BNP",
    "CANP",
    "CMANP",
    "CMANPAND",
    "CMHP",
    "CNP",
    "EQTNP",
    "LBANP",
    "LBANPND",
    "MAML",
    "MLP",
    "NP",
    "THP",
    "TNPA",
    "TNPD",
    "TNPND",
    "Attention",
    "ContinualNystromformer",
    "ContinualTransformer",
    "Events",
    "FewShot",
    "Field",
    "FrameEvents",
    "IncTNP",
    "Informer",
    "Intention",
    "IntentionModule",
    "LinTransformer",
    "NPFormer",
    "NPRegressor",
    "NeuralProcess",
    "Nystromformer",
    "PointProcess",
    "SigmaInformer",
    "StreamReader",
    "Transformer",
    "event_scores",
    "events_from_frame",
    "fit_field",
    "fit_streams",
    "trivial_event_scores",
]
