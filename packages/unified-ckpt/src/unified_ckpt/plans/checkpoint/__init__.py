"""The room `checkpoint`."""
