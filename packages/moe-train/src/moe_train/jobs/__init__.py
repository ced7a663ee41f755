"""The room `jobs`."""

from moe_train.jobs.generate import generate_text as generate_text
from moe_train.jobs.inspect import describe_checkpoint as describe_checkpoint
from moe_train.jobs.plan import plan_report as plan_report
