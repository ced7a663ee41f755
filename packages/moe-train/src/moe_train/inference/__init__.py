"""What the commands generate, chat and eval run, checked before any rank starts.

May import: evaluation, generation, checkpoint, data, launch, parallel, tokenization, model, rank,
config, cache, errors; comm_collectives, unified_ckpt.
"""

from moe_train.inference.chat import ChatJob as ChatJob
from moe_train.inference.chat import chat as chat
from moe_train.inference.evaluate import EvaluateJob as EvaluateJob
from moe_train.inference.evaluate import evaluate as evaluate
from moe_train.inference.evaluate import table_of as table_of
from moe_train.inference.generate import GenerateJob as GenerateJob
from moe_train.inference.generate import generate as generate
from moe_train.inference.generate import generate_text as generate_text
