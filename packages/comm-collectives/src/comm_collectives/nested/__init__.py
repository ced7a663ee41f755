"""The room `nested`."""
