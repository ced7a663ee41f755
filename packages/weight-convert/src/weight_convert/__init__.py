"""Streaming, bit-exact conversion of pretrained weights."""
