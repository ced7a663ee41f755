"""The room `families`."""

from moe_pipeline.families.catalog import Family as Family
from moe_pipeline.families.catalog import family_of as family_of
from moe_pipeline.families.upcycling import upcycled_state as upcycled_state
