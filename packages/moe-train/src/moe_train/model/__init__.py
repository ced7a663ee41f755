"""The decoder of every family, as pipeline stages, equal to that of transformers.

May import: labels, errors; moe_pipeline. It knows nothing of files or configuration files, and of
ranks what groups it is given.
"""

from moe_train.model.config import DecoderConfig as DecoderConfig
from moe_train.model.config import stage_layers as stage_layers
from moe_train.model.families import rules_of as rules_of
from moe_train.model.init import decays as decays
from moe_train.model.init import initialise as initialise
from moe_train.model.kv_cache import KeyValueCache as KeyValueCache
from moe_train.model.mtp import stored_name as stored_name
from moe_train.model.stage import EMBEDDING as EMBEDDING
from moe_train.model.stage import DecoderStage as DecoderStage
from moe_train.model.stage import StageOptions as StageOptions
from moe_train.model.stage import StageRecord as StageRecord
from moe_train.model.stage import Target as Target
