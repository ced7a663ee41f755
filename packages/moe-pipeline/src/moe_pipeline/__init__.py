"""Mixture-of-Experts layers, and pipeline schedules as data with an executor."""
