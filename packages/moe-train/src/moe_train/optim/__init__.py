"""The room `optim`."""
