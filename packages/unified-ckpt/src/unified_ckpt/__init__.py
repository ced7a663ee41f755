"""Crash-safe safetensors checkpoints that load under any parallel layout."""
