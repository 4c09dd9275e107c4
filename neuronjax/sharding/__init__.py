"""Meshes, and what each family may split over them."""

from neuronjax.primitives.collectives.plan import RingPlan as RingPlan
from neuronjax.primitives.collectives.plan import ring_plan as ring_plan
from neuronjax.sharding.attention import sharded_attention as sharded_attention
from neuronjax.sharding.attention_block_tkg import (
    sharded_attention_block_tkg as sharded_attention_block_tkg,
)
from neuronjax.sharding.attention_decode import (
    sharded_attention_tkg as sharded_attention_tkg,
)
from neuronjax.sharding.collectives import all_reduce as all_reduce
from neuronjax.sharding.collectives import all_to_all as all_to_all
from neuronjax.sharding.collectives import attn_q_batch_shard as attn_q_batch_shard
from neuronjax.sharding.context_parallel import (
    context_parallel_attention as context_parallel_attention,
)
from neuronjax.sharding.context_parallel import stride_sequence as stride_sequence
from neuronjax.sharding.context_parallel import unstride_sequence as unstride_sequence
from neuronjax.sharding.conv import sharded_conv1d as sharded_conv1d
from neuronjax.sharding.conv import (
    sharded_depthwise_conv1d as sharded_depthwise_conv1d,
)
from neuronjax.sharding.cross_entropy import (
    sharded_cross_entropy as sharded_cross_entropy,
)
from neuronjax.sharding.cross_entropy import (
    sharded_linear_cross_entropy as sharded_linear_cross_entropy,
)
from neuronjax.sharding.expert_parallel import (
    expert_parallel_moe as expert_parallel_moe,
)
from neuronjax.sharding.mesh import make_mesh as make_mesh
from neuronjax.sharding.mlp import sharded_mlp as sharded_mlp
from neuronjax.sharding.moe import (
    sharded_blockwise_mm_bwd as sharded_blockwise_mm_bwd,
)
from neuronjax.sharding.moe import sharded_moe_cte as sharded_moe_cte
from neuronjax.sharding.output_projection import (
    sharded_output_projection as sharded_output_projection,
)
from neuronjax.sharding.placement import place as place
from neuronjax.sharding.qkv import shard_qkv_columns as shard_qkv_columns
from neuronjax.sharding.qkv import sharded_qkv as sharded_qkv
from neuronjax.sharding.qkv import unshard_qkv_columns as unshard_qkv_columns
from neuronjax.sharding.ring_attention import ring_attention as ring_attention
from neuronjax.sharding.ring_matmul import (
    sharded_allgather_matmul as sharded_allgather_matmul,
)
from neuronjax.sharding.ring_matmul import (
    sharded_matmul_reduce_scatter as sharded_matmul_reduce_scatter,
)
