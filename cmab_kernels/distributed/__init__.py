"""States that are merged over a `torch.distributed` group or over the workers of a pool, and modules whose context is
spread over ranks."""

from .merge import all_merge_state
from .sharded import ShardedCMAB, ShardedMultiheadAttention, ShardedMultiheadIntention
from .tree import reduce_states

__all__ = ["ShardedCMAB", "ShardedMultiheadAttention", "ShardedMultiheadIntention", "all_merge_state", "reduce_states"]
