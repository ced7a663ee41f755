"""The room `deepep`."""
