"""The room `signature`."""
