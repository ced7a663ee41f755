"""Weight files that are pickles, read and written as data: torch's, Paddle's, distributed ones.

A room of its own, since nothing of a pickle is ever run here, and all of that is in one place.

May import: nothing but checks and errors.
"""

from weight_convert.pickles.dcp_folder import METADATA_NAME as METADATA_NAME
from weight_convert.pickles.dcp_folder import read_dcp as read_dcp
from weight_convert.pickles.paddle_file import read_paddle_file as read_paddle_file
from weight_convert.pickles.torch_file import read_torch_file as read_torch_file
from weight_convert.pickles.writing import StoredItem as StoredItem
from weight_convert.pickles.writing import dcp_pickle as dcp_pickle
from weight_convert.pickles.writing import one_torch_pickle as one_torch_pickle
from weight_convert.pickles.writing import paddle_parts as paddle_parts
from weight_convert.pickles.writing import torch_pickle as torch_pickle
