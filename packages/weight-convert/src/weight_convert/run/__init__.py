"""Carries out a plan: `convert`, and the report of what it did.

A room of its own: the only one that writes.

May import: plan, specs, files, staging.
"""

from weight_convert.run.conversion import Progress as Progress
from weight_convert.run.conversion import Report as Report
from weight_convert.run.conversion import convert as convert
