"""Which part of each tensor a rank of a layout holds, from the roles and dims of a family's spec.

A room of its own, since splitting, joining and sizes ask it alike, and it knows no files.

May import: specs.
"""

from weight_convert.cutting.cuts import DimCut as DimCut
from weight_convert.cutting.layout import SplitLayout as SplitLayout
from weight_convert.cutting.model import ModelCuts as ModelCuts
