"""What a split says of itself: `split.json`, from which `join` knows what each rank holds.

    record = SplitRecord(layout=SplitLayout(tp=2), model_type="qwen3_moe", tensors={...})
    SplitRecord.read(Path("split"))

Ranks stand in `rank-00000`, `rank-00001`, ...; each holds tensors under the names in memory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weight_convert._checks import Record
from weight_convert.cutting import SplitLayout
from weight_convert.errors import CorruptFileError, WeightConvertError

RECORD_NAME = "split.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecord(Record):
    """The layout of a split, and the whole tensors.

    Attributes:
        layout: the degrees.
        model_type: the family whose roles decided the cuts.
        tensors: (dtype, shape) of each whole tensor by its name in memory.
    """

    layout: SplitLayout
    model_type: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    def content(self) -> bytes:
        """The file."""
        fields = {
            "layout": asdict(self.layout),
            "model_type": self.model_type,
            "tensors": {key: [dtype, *shape] for key, (dtype, shape) in self.tensors.items()},
        }
        return (json.dumps(fields) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> "SplitRecord":
        """The record of a directory that `split` wrote.

        Raises:
            WeightConvertError: it has none.
            CorruptFileError: it is not what `split` writes.
        """
        path = folder / RECORD_NAME
        if not path.is_file():
            raise WeightConvertError(
                f"{folder} has no {RECORD_NAME}; give a directory that `weight-convert split` wrote"
            )
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            return cls(
                layout=SplitLayout(**fields["layout"]),
                model_type=fields["model_type"],
                tensors={
                    key: (dtype, tuple(shape)) for key, (dtype, *shape) in fields["tensors"].items()
                },
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(f"{path} is not what split writes ({error})") from error


def rank_folder(rank: int) -> str:
    """The name of a rank's directory."""
    return f"rank-{rank:05d}"
