"""The room `cells`."""
