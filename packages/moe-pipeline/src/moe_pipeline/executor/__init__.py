"""The room `executor`."""
