"""Scoring rules: how a token's router logits become scores of experts. A new rule is added here.

May import: no room.
"""

from moe_pipeline.scoring.functions import SCORE_FUNCTIONS as SCORE_FUNCTIONS
from moe_pipeline.scoring.functions import ScoreFunction as ScoreFunction
