"""The room `handles`."""
