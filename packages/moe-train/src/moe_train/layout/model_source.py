"""Which decoder a `config.json` or a checkpoint folder describes.

Where a folder's weights and its `config.json` disagree about multi-token prediction, the weights
decide: transformers writes `num_nextn_predict_layers` but drops those layers' weights.

    config = read_decoder(Path("checkpoint-250"))
"""

from itertools import takewhile
from pathlib import Path

from moe_train.model import DecoderConfig
from unified_ckpt import CheckpointError, read_index
from unified_ckpt.files.storage import Location
from weight_convert import WeightConvertError, read_catalog


def read_decoder(
    source: Path, weights: Path | Location | None = None, *, of_text: bool = False
) -> DecoderConfig:
    """The decoder of a `config.json`, or of a folder that holds one.

    In a folder with weights, the layers for multi-token prediction are those that it has weights
    of, at most `num_nextn_predict_layers`.

    Args:
        source: the file or the folder.
        weights: the checkpoint that holds the weights, where that is another place.
        of_text: take the decoder of text out of a model of text and images.

    Raises:
        ValueError: the file cannot be used.
    """
    config = DecoderConfig.from_file(source, of_text=of_text)
    if not config.mtp_layers or not source.is_dir():
        return config
    try:
        keys = set(read_index(weights or source, "model"))
    except CheckpointError:
        try:  # in another format, whose names end alike
            keys = set(read_catalog(source).tensors)
        except WeightConvertError:
            # A folder without readable weights: loading them will say what is wrong.
            return config
    ends = [f"layers.{n}.eh_proj.weight" for n in config.mtp_layers]
    present = [any(key.endswith(end) for key in keys) for end in ends]
    count = len(list(takewhile(bool, present)))
    return config if count == len(present) else config.with_mtp_layers(count)
