"""How well a model predicts: perplexity of whole sets, and questions with several choices.

May import: generation, data, tokenization, labels, errors.
"""

from moe_train.evaluation.multiple_choice import ChoiceRow as ChoiceRow
from moe_train.evaluation.multiple_choice import Question as Question
from moe_train.evaluation.multiple_choice import measure_choices as measure_choices
from moe_train.evaluation.multiple_choice import parse_question as parse_question
from moe_train.evaluation.multiple_choice import question_rows as question_rows
from moe_train.evaluation.perplexity import measure_perplexity as measure_perplexity
from moe_train.evaluation.scoring import EvaluationStoppedError as EvaluationStoppedError
from moe_train.evaluation.unigram import unigram_cross_entropy as unigram_cross_entropy
