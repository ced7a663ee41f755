"""The room `routes`."""
