"""Models that answer queries from keys and values."""

from .base import Regressor
from .baselines import MAML, LinTransformer, NPFormer, NPRegressor
from .few_shot import FewShot
from .module import IntentionModule
from .single import MLP, Attention, Intention
from .stacks import Informer, SigmaInformer, Transformer

__all__ = [
    "MAML",
    "MLP",
    "Attention",
    "FewShot",
    "Informer",
    "Intention",
    "IntentionModule",
    "LinTransformer",
    "NPFormer",
    "NPRegressor",
    "Regressor",
    "SigmaInformer",
    "Transformer",
]
