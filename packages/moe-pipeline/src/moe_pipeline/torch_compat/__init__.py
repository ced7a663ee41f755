"""The room `torch_compat`."""
