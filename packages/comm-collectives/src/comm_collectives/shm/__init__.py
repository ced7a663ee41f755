"""The room `shm`."""
