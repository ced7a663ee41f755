"""From files to batches: find the corpus, train a tokenizer, encode once, pack, mix, order.

May import: reading, tokenization, config, cache, labels, errors.
"""

from moe_train.data.describe import describe_corpus as describe_corpus
from moe_train.data.joined import JoinedSplit as JoinedSplit
from moe_train.data.joined import open_joined as open_joined
from moe_train.data.ledger import DataIdentity as DataIdentity
from moe_train.data.ledger import Ledger as Ledger
from moe_train.data.ledger import check_value as check_value
from moe_train.data.ledger import id_hashes as id_hashes
from moe_train.data.mixture import SourceShare as SourceShare
from moe_train.data.packing import Batch as Batch
from moe_train.data.prepare import PreparedCorpus as PreparedCorpus
from moe_train.data.prepare import prepare as prepare
from moe_train.data.whole import TokenFiles as TokenFiles
