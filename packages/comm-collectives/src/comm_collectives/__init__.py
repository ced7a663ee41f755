"""Collectives that are right for every shape and dtype, and MoE dispatch/combine."""
