"""The room `router`."""
