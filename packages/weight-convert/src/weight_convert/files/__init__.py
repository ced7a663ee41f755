"""What stands on disk: headers of files, and directories as catalogs of tensors.

A room of its own, since it knows files and nothing of families.

May import: pickles.
"""

from weight_convert.files.catalog import CONFIG_NAME as CONFIG_NAME
from weight_convert.files.catalog import INDEX_NAME as INDEX_NAME
from weight_convert.files.catalog import SINGLE_NAME as SINGLE_NAME
from weight_convert.files.catalog import Catalog as Catalog
from weight_convert.files.catalog import LeftOut as LeftOut
from weight_convert.files.catalog import SourceTensor as SourceTensor
from weight_convert.files.catalog import read_catalog as read_catalog
from weight_convert.files.catalog import read_frame as read_frame
from weight_convert.files.header import encode_header as encode_header
from weight_convert.files.header import layout_order as layout_order
from weight_convert.files.header import read_header as read_header
from weight_convert.files.header import tensor_size_bytes as tensor_size_bytes
