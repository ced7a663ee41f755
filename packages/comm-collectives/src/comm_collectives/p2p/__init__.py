"""The room `p2p`."""
