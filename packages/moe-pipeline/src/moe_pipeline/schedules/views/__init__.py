"""The room `views`."""
