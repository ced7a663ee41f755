"""What is computed again in the backward instead of being saved, and what is moved to the host.

Named so because `recompute` is a function of the face.

May import: weight_grad, comm_collectives.
"""

from moe_pipeline.recomputation.offload import ActivationOffload as ActivationOffload
from moe_pipeline.recomputation.output_discarding import discard_outputs as discard_outputs
from moe_pipeline.recomputation.output_discarding import discarded as discarded
from moe_pipeline.recomputation.recomputing import is_replaying as is_replaying
from moe_pipeline.recomputation.recomputing import keep_plan as keep_plan
from moe_pipeline.recomputation.recomputing import recompute as recompute
from moe_pipeline.recomputation.recomputing import recompute_contexts as recompute_contexts
from moe_pipeline.recomputation.recomputing import recorded as recorded
from moe_pipeline.recomputation.recomputing import replayed_plan as replayed_plan
from moe_pipeline.recomputation.selective import MATRIX_PRODUCTS as MATRIX_PRODUCTS
from moe_pipeline.recomputation.selective import recompute_modules as recompute_modules
from moe_pipeline.recomputation.selective import selective_recompute as selective_recompute
