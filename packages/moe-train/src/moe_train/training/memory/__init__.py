"""Whose memory a rank runs in, what it allocates, and what is told when there is none left.

May import: config, rank, early_checks, errors; gpu_alloc, moe_pipeline.
"""

from moe_train.training.memory.rank_memory import LABELS as LABELS
from moe_train.training.memory.rank_memory import RankMemory as RankMemory
from moe_train.training.memory.rank_memory import trace_file as trace_file
