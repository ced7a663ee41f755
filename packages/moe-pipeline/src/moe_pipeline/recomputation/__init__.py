"""The room `recomputation`."""
