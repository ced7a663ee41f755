"""What may be computed, as data: `compute/` knows how, and imports torch for it.

A room of its own, so that jobs are planned, and dry runs made, without torch.

May import: nothing but checks and errors.
"""

from weight_convert.operations.elementwise import Cast as Cast
from weight_convert.operations.elementwise import Transpose as Transpose
from weight_convert.operations.lowrank import AddLowRank as AddLowRank
from weight_convert.operations.lowrank import Factorise as Factorise
from weight_convert.operations.merging import Combine as Combine
from weight_convert.operations.operation import Operation as Operation
from weight_convert.operations.quantized import FromBlocks as FromBlocks
from weight_convert.operations.quantized import FromMx as FromMx
from weight_convert.operations.quantized import ToBlocks as ToBlocks
from weight_convert.operations.quantized import ToMx as ToMx
from weight_convert.operations.random import DrawRows as DrawRows
