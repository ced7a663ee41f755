"""Join the directories of ranks that `split` wrote into one model again.

join("split", "whole")
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weight_convert._checks import check_kind, checked_path
from weight_convert.cutting import DimCut, ModelCuts
from weight_convert.errors import CorruptFileError
from weight_convert.files import read_catalog, read_frame
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan import spec_of
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output
from weight_convert.specs import FamilySpec
from weight_convert.splitting.boxes import put_together
from weight_convert.splitting.record import RECORD_NAME, SplitRecord, rank_folder


def join(
    src: Path | str,
    dst: Path | str,
    *,
    spec: FamilySpec | None = None,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Join what `split` wrote into the new model directory `dst`, in the format `fused`.

    Padding of the vocabulary is left out; of what several ranks hold, the first one's is taken.

    Args:
        src: a directory with `split.json`.
        dst: the output; must not exist.
        spec: the family; None takes it from `config.json`.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Raises:
        CorruptFileError: a rank lacks a tensor, or has it with another dtype or shape.
        WeightConvertError: no `split.json`, or another family.
        OSError: reading or writing failed. Whatever is raised, `dst` does not exist afterwards.
    """
    source = checked_path(src)
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    record = SplitRecord.read(source)
    folders = [rank_folder(rank) for rank in range(record.layout.world_size)]
    frame = read_frame(source, frozenset({RECORD_NAME, *folders}))
    model = ModelCuts.of(
        {key: shape for key, (_, shape) in record.tensors.items()},
        spec_of(frame, spec),
        frame.config,
        record.layout,
    )
    names: list[str] = []
    ranks: list[dict[str, PlannedTensor]] = []
    for folder in folders:
        if not (source / folder).exists():
            raise CorruptFileError(
                f"{source / folder} is missing; {RECORD_NAME} is of {len(folders)} ranks, each of "
                f"which has a folder"
            )
        catalog = read_catalog(source / folder) if (source / folder).is_dir() else None
        held = {} if catalog is None else catalog.tensors
        ranks.append(
            {key: PlannedTensor.of(tensor).behind(len(names)) for key, tensor in held.items()}
        )
        names += [] if catalog is None else [f"{folder}/{name}" for name in catalog.files]
        frame = frame if catalog is None else replace(frame, metadata=catalog.metadata)
    work = Computations(num_sources=len(names))
    joiner = _Joiner(source, model, ranks, work)
    tensors = [joiner.whole(key, dtype, shape) for key, (dtype, shape) in record.tensors.items()]
    output = Output(tensors=tensors, work=work, sources=tuple(names), config={})
    return write_output(frame, output, dst, options=options, on_progress=on_progress)


class _Joiner:
    """Finds the parts of tensors on ranks, and puts them together."""

    def __init__(
        self,
        source: Path,
        model: ModelCuts,
        ranks: Sequence[dict[str, PlannedTensor]],
        work: Computations,
    ) -> None:
        self._source = source
        self._model = model
        self._ranks = ranks
        self._work = work

    def whole(self, key: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
        """The whole tensor: inner dims are joined first, and then the experts."""
        like = PlannedTensor(
            key=key, dtype=dtype, shape=shape, pieces=(), order=(natural_key(key), 0, 0)
        )
        cuts = sorted(self._model.cuts[key], key=lambda cut: cut.dim)
        return replace(self._joined(like, cuts, {}), order=like.order)

    def _joined(
        self, like: PlannedTensor, cuts: Sequence[DimCut], places: dict[str, int]
    ) -> PlannedTensor:
        if not cuts:
            return self._part(like, places)
        cut, *rest = cuts
        parts = []
        for place in range(len(cut.ranges)):
            length = cut.length(place)
            shape = (*like.shape[: cut.dim], length, *like.shape[cut.dim + 1 :])
            parts.append(self._joined(replace(like, shape=shape), rest, places | {cut.axis: place}))
        return put_together(like, parts, cut, self._work)

    def _part(self, like: PlannedTensor, places: dict[str, int]) -> PlannedTensor:
        """What the first rank at these places holds."""
        for rank, tensors in enumerate(self._ranks):
            at = self._model.layout.places(rank)
            if any(at[axis] != place for axis, place in places.items()):
                continue
            if not self._model.is_on(at["pp"], like.key):
                continue
            found = tensors.get(like.key)
            if found is None or (found.dtype, found.shape) != (like.dtype, like.shape):
                what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise CorruptFileError(
                    f"{self._source / rank_folder(rank)} has {what} as {like.key}; expected "
                    f"{like.dtype} {list(like.shape)}, by {RECORD_NAME}"
                )
            return found
        raise CorruptFileError(f"{self._source}: no rank has {like.key}")
