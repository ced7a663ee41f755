"""The room `training`."""
