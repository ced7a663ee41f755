"""Text from a decoder on one or several ranks: cache, sampling, stop strings, streaming.

May import: parallel, layout, tokenization, model, config, errors; comm_collectives,
unified_ckpt.
"""

from moe_train.generation.model_ranks import ModelOptions as ModelOptions
from moe_train.generation.model_ranks import ModelRanks as ModelRanks
from moe_train.generation.model_ranks import check_model as check_model
from moe_train.generation.model_ranks import load_model as load_model
from moe_train.generation.model_ranks import open_model as open_model
from moe_train.generation.options import GenerationOptions as GenerationOptions
from moe_train.generation.rounds import Completion as Completion
from moe_train.generation.rounds import check_prompts as check_prompts
from moe_train.generation.rounds import generate_all as generate_all
from moe_train.generation.rounds import prompt_ids as prompt_ids
from moe_train.generation.rounds import stream_text as stream_text
from moe_train.generation.text_generator import TextGenerator as TextGenerator
