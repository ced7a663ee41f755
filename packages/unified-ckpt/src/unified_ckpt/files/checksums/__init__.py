"""The room `checksums`."""
