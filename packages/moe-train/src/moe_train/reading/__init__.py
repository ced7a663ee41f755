"""What people have, as documents: text, rows, conversations, pairs and token arrays.

Files are read in pieces of some megabytes by any number of processes, which start without torch.

May import: tokenization, config, errors; pyarrow.
"""

from moe_train.reading.corpus import Document as Document
from moe_train.reading.encode import EncodeJob as EncodeJob
from moe_train.reading.plan import SourcePlan as SourcePlan
from moe_train.reading.plan import digest_of as digest_of
from moe_train.reading.plan import find_files as find_files
from moe_train.reading.plan import plan_source as plan_source
from moe_train.reading.plan import training_texts as training_texts
from moe_train.reading.spans import Span as Span
from moe_train.reading.worker import make_piece as make_piece
from moe_train.reading.worker import piece_path as piece_path
from moe_train.reading.worker import store_task as store_task
from moe_train.reading.worker import take_piece as take_piece
