"""The room `control`."""
