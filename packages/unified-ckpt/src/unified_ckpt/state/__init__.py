"""A nested state dict in pieces, shards and plain values, and the way back.

May import: plans, files/storage, geometry.
"""

from unified_ckpt.state.flat_state import FlatState as FlatState
from unified_ckpt.state.nested import StateDict as StateDict
from unified_ckpt.state.nested import flatten_state as flatten_state
from unified_ckpt.state.placing import find_tied_keys as find_tied_keys
from unified_ckpt.state.placing import place_tensor as place_tensor
from unified_ckpt.state.random_state import random_state_files as random_state_files
from unified_ckpt.state.random_state import restore_random_state as restore_random_state
from unified_ckpt.state.structure import Stateful as Stateful
from unified_ckpt.state.structure import Structures as Structures
from unified_ckpt.state.values import StoredValues as StoredValues
from unified_ckpt.state.values import encode_value as encode_value
from unified_ckpt.state.values import restore_value as restore_value
