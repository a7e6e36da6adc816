"""Attention over any number of keys, in memory that does not grow with them: fused kernels with a mergeable, streaming
state."""

import torch

from .attention import (
    AttentionState,
    Removal,
    attention_state,
    empty_state,
    latent_attention,
    merge_states,
    prefix_attention_states,
    projected_attention_state,
    remove_from_state,
)
from .intention import (
    RidgeSolution,
    RidgeState,
    RidgeStep,
    empty_ridge,
    intention,
    merge_ridge,
    prefix_ridge_states,
    regularised_inverse,
    regularised_solve,
    remove_ridge,
    ridge_state,
    ridge_step,
    sigma_intention,
    solve_ridge,
    variants,
)
from .layers import attention_layer, feed_forward_layer
from .nystrom import (
    ContinualAttentionState,
    ContinualNystromState,
    StepResult,
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
    iterative_pinv,
    move_state,
    nystrom_attention,
    state_from_tensors,
    state_to_tensors,
)
from .online import OnlineRidge
from .runtime.backends import Explanation, explain, use_impl
from .runtime.calls import ModuleExplanation
from .window import StateTree, StateWindow

# `torch.load` may read saved states under `weights_only=True`: these classes hold only tensors and
# ints, and constructing them runs no other code.
torch.serialization.add_safe_globals([AttentionState, RidgeState, ContinualAttentionState, ContinualNystromState])

# The function `intention` hides the subpackage of the same name, so the estimators are an attribute of the function:
# `cmab_kernels.intention.variants`.
intention.variants = variants  # type: ignore[attr-defined]  # a function has no such attribute by itself

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "ContinualAttentionState",
    "ContinualNystromState",
    "Explanation",
    "ModuleExplanation",
    "OnlineRidge",
    "Removal",
    "RidgeSolution",
    "RidgeState",
    "RidgeStep",
    "StateTree",
    "StateWindow",
    "StepResult",
    "attention_layer",
    "attention_state",
    "continual_attention_init",
    "continual_attention_step",
    "continual_nystrom_init",
    "continual_nystrom_step",
    "empty_ridge",
    "empty_state",
    "explain",
    "feed_forward_layer",
    "intention",
    "iterative_pinv",
    "latent_attention",
    "merge_ridge",
    "merge_states",
    "move_state",
    "nystrom_attention",
    "prefix_attention_states",
    "prefix_ridge_states",
    "projected_attention_state",
    "regularised_inverse",
    "regularised_solve",
    "remove_from_state",
    "remove_ridge",
    "ridge_state",
    "ridge_step",
    "sigma_intention",
    "solve_ridge",
    "state_from_tensors",
    "state_to_tensors",
    "use_impl",
]
