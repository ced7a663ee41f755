"""Where each parameter lies: which box of it a rank holds, and under which keys it is stored.

May import: model, errors; mesh_spmd, moe_pipeline, unified_ckpt, weight_convert.
"""

from moe_train.layout.model_source import read_decoder as read_decoder
from moe_train.layout.parameters import ParameterLayout as ParameterLayout
from moe_train.layout.parameters import StoredTensors as StoredTensors
from moe_train.layout.parameters import is_expert as is_expert
from moe_train.layout.parameters import parameter_layouts as parameter_layouts
from moe_train.layout.parameters import single_rank_layouts as single_rank_layouts
from moe_train.layout.parameters import stage_tensors as stage_tensors
from moe_train.layout.parameters import stored_tensors as stored_tensors
from moe_train.layout.trainable import chosen_names as chosen_names
from moe_train.layout.trainable import decoder_shapes as decoder_shapes
from moe_train.layout.vocabulary import has_new_rows as has_new_rows
from moe_train.layout.vocabulary import load_first_rows as load_first_rows
