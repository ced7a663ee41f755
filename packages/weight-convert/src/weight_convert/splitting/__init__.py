"""Directories of ranks: a model cut for other programs that load whole files, and joined again.

A room of its own, since it writes and reads many directories where other jobs have one.

May import: run, plan, cutting, outputs, specs, files.
"""

from weight_convert.splitting.joining import join as join
from weight_convert.splitting.splitting import split as split
