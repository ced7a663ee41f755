"""The room `drop_in`."""
