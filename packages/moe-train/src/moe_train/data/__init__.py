"""From files to batches: find the corpus, train a tokenizer, encode once, pack, order.

May import: reading, tokenization, config, cache, labels, errors.
"""

from moe_train.data.order import SampleOrder as SampleOrder
from moe_train.data.packing import Batch as Batch
from moe_train.data.packing import PackedSplit as PackedSplit
from moe_train.data.prepare import PreparedCorpus as PreparedCorpus
from moe_train.data.prepare import PreparedSource as PreparedSource
from moe_train.data.prepare import prepare as prepare
from moe_train.data.token_store import TokenStore as TokenStore
from moe_train.data.token_store import open_store as open_store
from moe_train.data.unigram import unigram_cross_entropy as unigram_cross_entropy
