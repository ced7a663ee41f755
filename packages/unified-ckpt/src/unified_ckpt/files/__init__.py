"""The room `files`."""
