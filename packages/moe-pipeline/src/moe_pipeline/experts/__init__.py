"""The room `experts`."""
