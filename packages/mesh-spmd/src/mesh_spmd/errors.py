"""The errors of this package: one base, and one class for each built-in kind that callers catch.

Every message says what was given, what was expected and what to change.

    try:
        mesh.axis_size("tp")
    except MeshSpmdError as error:
        print(error)   # unknown axis 'tp'; this mesh has pp, dp, ep
"""


class MeshSpmdError(Exception):
    """Base of everything that mesh_spmd raises on purpose."""


class MeshValueError(MeshSpmdError, ValueError):
    """A value does not fit: an axis that the mesh lacks, a dim or a rank out of range."""


class MeshTypeError(MeshSpmdError, TypeError):
    """An argument has the wrong type, or is a placement whose shards are not boxes."""


class MeshStateError(MeshSpmdError, RuntimeError):
    """The process is not in the state that a call needs, for example there is no process group."""
