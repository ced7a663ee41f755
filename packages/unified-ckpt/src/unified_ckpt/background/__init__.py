"""The room `background`."""
