"""States merged over the processes of a `torch.distributed` group, and modules whose context is spread over them."""

from .merge import all_merge_state
from .sharded import ShardedCMAB, ShardedMultiheadAttention, ShardedMultiheadIntention

__all__ = ["ShardedCMAB", "ShardedMultiheadAttention", "ShardedMultiheadIntention", "all_merge_state"]
