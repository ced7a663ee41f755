"""The room `autograd`."""
