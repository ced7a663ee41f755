"""The room `fuzz`."""
