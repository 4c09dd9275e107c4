"""What leaves share: casts, replica groups and the permute ring."""

from neuronjax.kernels.shard_common.casts import contract as contract
from neuronjax.kernels.shard_common.casts import laid_like as laid_like
from neuronjax.kernels.shard_common.casts import settled as settled
from neuronjax.kernels.shard_common.casts import uniform as uniform
from neuronjax.kernels.shard_common.casts import varying as varying
from neuronjax.kernels.shard_common.divided import is_divided as is_divided
from neuronjax.kernels.shard_common.divided import shards as shards
from neuronjax.kernels.shard_common.groups import Group as Group
from neuronjax.kernels.shard_common.groups import all_reduce as all_reduce
from neuronjax.kernels.shard_common.groups import channel_count as channel_count
from neuronjax.kernels.shard_common.groups import (
    consecutive_groups as consecutive_groups,
)
from neuronjax.kernels.shard_common.groups import group_size as group_size
from neuronjax.kernels.shard_common.groups import own_rank as own_rank
from neuronjax.kernels.shard_common.ring import Step as Step
from neuronjax.kernels.shard_common.ring import arriving as arriving
from neuronjax.kernels.shard_common.ring import (
    current_processing_rank_id as current_processing_rank_id,
)
from neuronjax.kernels.shard_common.ring import reduced as reduced
from neuronjax.kernels.shard_common.ring import steps as steps
