"""The room `transport`."""
