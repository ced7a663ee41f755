"""The room `misuse`."""
