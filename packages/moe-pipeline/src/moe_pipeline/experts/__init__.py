"""The room `experts`."""

from moe_pipeline.experts.activations import Activation as Activation
from moe_pipeline.experts.compute import experts_function as experts_function
from moe_pipeline.experts.token_experts import token_experts_function as token_experts_function
from moe_pipeline.experts.weights import ExpertWeights as ExpertWeights
