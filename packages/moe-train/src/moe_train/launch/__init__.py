"""The room `launch`."""
