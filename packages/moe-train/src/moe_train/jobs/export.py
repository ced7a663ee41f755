"""The weights of a checkpoint alone, in any format of the family, for other programs.

    export_weights("runs/job/checkpoint-500", Path("out"), to="megatron", files=None, part="model")

The checkpoint is read by unified-ckpt and its tensors are written whole, as transformers has them;
weight-convert makes the other formats of that, bit for bit.
"""

import shutil
import tempfile
from pathlib import Path

from moe_train.errors import TrainValueError
from unified_ckpt.files.storage import as_target
from unified_ckpt.tools import export_model
from weight_convert import ConversionOptions, WeightConvertError, convert
from weight_convert.run import FileKind


def export_weights(
    checkpoint: str, target: Path, *, to: str, files: FileKind | None, part: str
) -> list[str]:
    """Write the new folder `target`; return what there is to say of it.

    Args:
        checkpoint: a folder, or the URL of a checkpoint in a store.
        target: the folder to write.
        to: a format of the family.
        files: kind of weight files; None for that of the format.
        part: whose tensors: `model`, `ema` or `master_weights`.

    Raises:
        ValueError: the target exists, or the family has no such format.
        CheckpointError: the checkpoint cannot be read, or has no such part.
    """
    if target.exists():
        raise TrainValueError(f"{target} exists; choose another folder")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
    try:
        whole = folder / "whole"
        export_model(as_target("checkpoint", checkpoint), whole, part=part)
        report = convert(whole, target, to=to, options=ConversionOptions(files=files))
    except WeightConvertError as error:
        raise TrainValueError(f"{checkpoint}: {error}") from error
    finally:
        shutil.rmtree(folder)
    lines = [f"wrote {report.num_tensors:,} tensors, {report.total_bytes:,} bytes, to {target}"]
    if report.is_experimental:
        lines.append(f"experimental: no other project's code has shown that it reads {to}")
    return lines
