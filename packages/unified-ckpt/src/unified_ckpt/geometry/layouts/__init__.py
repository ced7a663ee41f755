"""The room `layouts`."""
