"""The room `optimizer`."""
