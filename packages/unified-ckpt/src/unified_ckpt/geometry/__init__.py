"""The room `geometry`."""
