"""The room `state`."""
