"""The room `agreement`."""
