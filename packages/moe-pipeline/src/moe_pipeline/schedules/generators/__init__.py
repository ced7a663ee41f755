"""The room `generators`."""
