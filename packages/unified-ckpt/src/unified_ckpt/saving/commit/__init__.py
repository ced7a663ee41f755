"""The room `commit`."""
