"""The room `groups`."""
