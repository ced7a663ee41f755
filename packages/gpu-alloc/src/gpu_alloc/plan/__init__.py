"""Lifetime plans: a place for every large request of a step, known before it comes.

May import: events and errors.
"""

from gpu_alloc.plan.lifetime_plan import END_OF_STEP as END_OF_STEP
from gpu_alloc.plan.lifetime_plan import LifetimePlan as LifetimePlan
from gpu_alloc.plan.lifetime_plan import PlanUse as PlanUse
from gpu_alloc.plan.lifetime_plan import check_in_use as check_in_use
from gpu_alloc.plan.lifetime_plan import check_plan as check_plan
from gpu_alloc.plan.lifetime_plan import is_step_mark as is_step_mark
from gpu_alloc.plan.planning import plan_step as plan_step
