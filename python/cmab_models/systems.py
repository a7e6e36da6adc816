"""The models by the names that the command line and the tasks use."""

from __future__ import annotations

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
)
from .point_processes import CMHP, THP
from .pretrained import Pretrained
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
from .streams import ContinualNystromformer, ContinualTransformer, Nystromformer

SYSTEMS: dict[str, type[Pretrained]] = {
    "cmanp": CMANP,
    "cmanp-and": CMANPAND,
    "lbanp": LBANP,
    "lbanp-nd": LBANPND,
    "cnp": CNP,
    "canp": CANP,
    "np": NP,
    "anp": ANP,
    "bnp": BNP,
    "banp": BANP,
    "eqtnp": EQTNP,
    "tnp-a": TNPA,
    "tnp-d": TNPD,
    "tnp-nd": TNPND,
    "inctnp": IncTNP,
    "cmhp": CMHP,
    "thp": THP,
    "continual-nystromformer": ContinualNystromformer,
    "continual-transformer": ContinualTransformer,
    "nystromformer": Nystromformer,
    "intention": Intention,
    "intention-module": IntentionModule,
    "informer": Informer,
    "sigma-informer": SigmaInformer,
    "attention": Attention,
    "transformer": Transformer,
    "lin-transformer": LinTransformer,
    "np-former": NPFormer,
    "np-regressor": NPRegressor,
    "maml": MAML,
    "mlp": MLP,
    "few-shot": FewShot,
}
