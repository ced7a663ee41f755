"""The room `dcp`."""
