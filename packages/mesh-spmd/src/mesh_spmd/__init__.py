"""Process meshes, placements and sharding geometry for SPMD training.

Importing this package does not import torch; the first use of a name does.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Box": "boxes",
    "MeshSpmdError": "errors",
    "MeshStateError": "errors",
    "MeshTypeError": "errors",
    "MeshValueError": "errors",
    "ProcessMesh": "mesh",
    "Spec": "spec",
    "all_boxes": "boxes",
    "axis_group": "axis_groups",
    "choose_placements": "choice",
    "local_box": "boxes",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
