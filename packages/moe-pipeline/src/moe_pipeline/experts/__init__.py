"""What the experts of one rank compute, on sorted rows or on tokens, forward and backward.

May import: weight_grad, comm_collectives.
"""

from moe_pipeline.experts.activations import Activation as Activation
from moe_pipeline.experts.compute import experts_function as experts_function
from moe_pipeline.experts.token_experts import token_experts_function as token_experts_function
from moe_pipeline.experts.weights import ExpertWeights as ExpertWeights
