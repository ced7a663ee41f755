"""The room `layer`."""
