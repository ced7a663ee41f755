"""The command `weight-convert`, one file a command.

May import: opinions, adapters, merging, quantization, splitting, upcycling, cutting, run,
verification, plan, specs, files.
"""

from weight_convert.cli.main import main as main
