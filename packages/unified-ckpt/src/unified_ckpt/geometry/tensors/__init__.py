"""The room `tensors`."""
