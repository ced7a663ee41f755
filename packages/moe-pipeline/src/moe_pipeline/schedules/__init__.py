"""The room `schedules`."""

from moe_pipeline.schedules.planner import plan as plan
