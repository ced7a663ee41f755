"""Operations that need no layer: a loss without all logits, random numbers by token.

May import: no room.
"""

from moe_pipeline.ops.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from moe_pipeline.ops.dropout import dropout as dropout
from moe_pipeline.ops.dropout import dropout_add as dropout_add
from moe_pipeline.ops.rng import counter_key as counter_key
from moe_pipeline.ops.rng import counter_uniform as counter_uniform
