"""The room `plans`."""
