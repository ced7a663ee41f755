"""The room `loading`."""
