"""The room `weight_grad`."""
