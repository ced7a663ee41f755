"""The room `schedules`."""
