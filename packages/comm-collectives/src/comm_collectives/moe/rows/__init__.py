"""The room `rows`."""
