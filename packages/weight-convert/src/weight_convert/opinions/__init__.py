"""Two directories as transformers loads them: a second opinion on values, and logits.

A room of its own, since no rule of this package has a say in it. Importing it imports no torch.

May import: compute, outputs, staging.
"""

from weight_convert.opinions.opinion import Opinion as Opinion
from weight_convert.opinions.opinion import numbers_differ as numbers_differ
from weight_convert.opinions.opinion import second_opinion as second_opinion
