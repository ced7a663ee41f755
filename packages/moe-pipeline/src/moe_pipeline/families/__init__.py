"""The MoE blocks of the published families: their configurations and the layout of their tensors.

`moe_pipeline.families.transformers` is the one module that imports transformers; not this door.

Catalogue: families.
May import: experts, weight_grad.
"""

from moe_pipeline.families.catalog import Family as Family
from moe_pipeline.families.catalog import family_of as family_of
from moe_pipeline.families.upcycling import upcycled_state as upcycled_state
