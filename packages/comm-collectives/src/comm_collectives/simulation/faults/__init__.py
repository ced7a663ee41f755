"""The room `faults`."""
