"""The room `format`."""
