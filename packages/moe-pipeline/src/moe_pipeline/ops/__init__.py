"""The room `ops`."""
