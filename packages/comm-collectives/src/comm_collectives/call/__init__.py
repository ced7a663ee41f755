"""The room `call`."""
