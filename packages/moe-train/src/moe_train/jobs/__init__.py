"""The room `jobs`."""
