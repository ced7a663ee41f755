"""The room `simulation`."""
