"""The room `fuzz`."""

from comm_collectives.simulation.fuzz.fuzzing import fuzz as fuzz
