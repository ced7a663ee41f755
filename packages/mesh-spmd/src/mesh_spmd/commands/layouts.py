"""Layouts as `mesh-spmd plan` takes them: a mesh, and sections behind slashes.

dp=2,ep=8/ep=0                              # dim 0 is cut over ep; other axes replicate
dp=2,ep=4/ep=0:20+0+4+40                    # into just these parts: ragged
dp=2,ep=4/dp=0,ep=0/order=ep,dp             # ep is the outer one of the two on dim 0
dp=2,ep=4/ep=0/flat=dp                      # each box's elements are cut over dp; flat=dp:100+28
dp=2,ep=4/dp=sum,ep=0/ranks=8-15            # a sum is due over dp; on ranks 8 to 15
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_spmd._checks import RANKS_AT_MOST
from mesh_spmd.commands.options import parse_integer, parse_mesh
from mesh_spmd.errors import MeshSpmdError, MeshValueError

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from mesh_spmd.layout import FlatSpec, Spec

SYNTAX = """\
a layout is a mesh, and sections behind slashes, in any order:
  dp=2,ep=4                         axes and sizes, outermost first; every axis replicates
  dp=2,ep=4/ep=0                    ep cuts dim 0 evenly, as torch.chunk does
  dp=2,ep=4/ep=0:20+0+4+40          ragged: into just these parts, one for each index of ep
  dp=2,ep=4/dp=0,ep=0/order=ep,dp   both cut dim 0, ep first; without order, in mesh order
  dp=2,ep=4/ep=0/flat=dp            the elements of each box are cut over dp (FlatSpec)
  dp=2,ep=4/ep=0/flat=dp:100+28     into just these parts
  dp=2,ep=4/dp=sum,ep=0             a reduction is due: sum, avg, max, min, product, any, all
  dp=2,ep=4/ep=0/ranks=8-15         the mesh lies on these ranks (also 0,2,4-9), not on 0, 1, ...
"""

_SECTIONS = ("order", "flat", "ranks")


def parse_layout(text: str, *, what: str) -> Spec | FlatSpec:
    """Return the layout that `text` says; `what`, source or target, is named in errors.

    Raises:
        MeshValueError: a part of it cannot be read, or it does not fit the mesh.
    """
    try:
        return _layout(text)
    except MeshSpmdError as error:
        raise type(error)(f"the {what} layout {text!r}: {error}") from error


def _layout(text: str) -> Spec | FlatSpec:
    from mesh_spmd.layout import FlatSpec, Spec
    from mesh_spmd.mesh import ProcessMesh

    axes, *rest = text.split("/")
    mesh = parse_mesh(axes, option="the mesh")
    clash = [axis for axis in mesh.axis_names if axis in _SECTIONS]
    if clash:
        raise MeshValueError(
            f"an axis is named {clash[0]!r}, which begins a section here; name it otherwise"
        )
    found = _sections(rest)
    if "ranks" in found:
        mesh = ProcessMesh(mesh.shape, mesh.axis_names, _ranks(found["ranks"]))
    placements, sizes = _shards(found.get("", ""))
    order = _names(found.get("order", ""))
    spec = Spec.from_axes(mesh, placements, order=order, sizes=sizes)
    if "flat" not in found:
        return spec
    flat, colon, parts = found["flat"].partition(":")
    return FlatSpec(spec, _names(flat), _parts(parts, axis=flat) if colon else None)


def _sections(texts: list[str]) -> dict[str, str]:
    """The sections by their names; that of the shards has none."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name.strip() not in _SECTIONS:
            name, value = "", text
        name = name.strip()
        if name in found:
            raise MeshValueError(
                f"there are two sections {(name + '=') if name else 'of shards'}: "
                f"{found[name]!r} and {value!r}; put a comma between what belongs together, as in "
                f"{'order=ep,dp' if name else 'dp=0,ep=1'}"
            )
        if not value.strip() and name:
            raise MeshValueError(f"nothing stands behind {name}=; leave the section out")
        found[name] = value
    return found


def _shards(text: str) -> tuple[dict[str, Placement], dict[str, tuple[int, ...]]]:
    """Placements by axis, and the sizes of ragged ones, of `dp=sum,ep=0:20+44`."""
    from torch.distributed.tensor import Partial, Shard

    from mesh_spmd.layout import PARTIAL_KINDS

    placements: dict[str, Placement] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, _, value = item.partition("=")
        dim, colon, parts = value.partition(":")
        if not (axis and dim):
            raise MeshValueError(
                f"got {item!r} where axis=dim must stand, as in ep=0 or ep=0:20+44"
            )
        if axis in placements:
            raise MeshValueError(f"{axis} is placed twice in {text!r}; place each axis once")
        if dim in PARTIAL_KINDS and not colon:
            placements[axis] = Partial(dim)
        elif dim.removeprefix("-").isdecimal():
            placements[axis] = Shard(int(dim))
            if colon:
                sizes[axis] = _parts(parts, axis=axis)
        else:
            raise MeshValueError(
                f"got {item!r}; behind {axis}= must stand a tensor dim, as in {axis}=0, or a "
                f"reduction that is due: {', '.join(PARTIAL_KINDS)}"
            )
    return placements, sizes


def _parts(text: str, *, axis: str) -> tuple[int, ...]:
    return tuple(
        parse_integer(part, option=f"the parts of {axis}, {text!r} (as in 20+0+44),")
        for part in text.split("+")
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _ranks(text: str) -> list[int]:
    """The ranks of `0,2,4-9`."""
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        low = parse_integer(first, option=f"ranks={text} (as in 8-15)")
        high = parse_integer(last, option=f"ranks={text} (as in 8-15)") if dash else low
        if high < low:
            raise MeshValueError(f"ranks={text} counts down in {item!r}; write {high}-{low}")
        if high - low >= RANKS_AT_MOST:
            raise MeshValueError(f"ranks={text} has more than {RANKS_AT_MOST} ranks in {item!r}")
        found += range(low, high + 1)
    return found
