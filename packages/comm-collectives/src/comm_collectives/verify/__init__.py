"""The room `verify`."""
