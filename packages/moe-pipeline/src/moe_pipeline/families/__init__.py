"""The room `families`."""
