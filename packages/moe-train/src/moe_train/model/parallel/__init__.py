"""Parts of a decoder that several ranks compute together: context, tensor and sequence parallelism.

Outside of attention and dense MLPs a rank has its own positions, as if it were one more
data-parallel rank; here is who has which positions, and how those blocks see all of them.

May import: errors, labels; comm_collectives. Groups are handed in.
"""

from moe_train.model.parallel.head_exchange import HeadExchange as HeadExchange
from moe_train.model.parallel.head_exchange import HeadWidths as HeadWidths
from moe_train.model.parallel.head_exchange import as_many_each as as_many_each
from moe_train.model.parallel.head_exchange import heads_read as heads_read
from moe_train.model.parallel.position_cut import WHOLE as WHOLE
from moe_train.model.parallel.position_cut import PositionCut as PositionCut
from moe_train.model.parallel.ring import RingAttention as RingAttention
from moe_train.model.parallel.ring import RingWidths as RingWidths
from moe_train.model.parallel.sample_share import SampleShare as SampleShare
from moe_train.model.parallel.tensor_parallel import ALONE as ALONE
from moe_train.model.parallel.tensor_parallel import TensorParallel as TensorParallel
from moe_train.model.parallel.vocabulary import VocabularyShare as VocabularyShare
