"""Carries out a plan: `convert`, and the report of what it did.

A room of its own: the only one that writes.

May import: plan, outputs, operations, specs, files, staging.
"""

from weight_convert._kinds import FileKind as FileKind
from weight_convert.run.conversion import convert as convert
from weight_convert.run.execution import Progress as Progress
from weight_convert.run.job import begin as begin
from weight_convert.run.job import carry_out as carry_out
from weight_convert.run.output import Output as Output
from weight_convert.run.output import OutputOptions as OutputOptions
from weight_convert.run.output import write_output as write_output
from weight_convert.run.report import Report as Report
