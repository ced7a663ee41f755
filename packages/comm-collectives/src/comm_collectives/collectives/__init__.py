"""The room `collectives`."""
