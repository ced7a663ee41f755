"""The decoder: transformers' Qwen3-MoE shape, split into pipeline stages."""
