"""The room `moe`."""
