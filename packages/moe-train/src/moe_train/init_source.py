"""Weights to begin with in any format that weight-convert knows, as the folder that is loaded.

What transformers wrote is loaded where it stands. Other files and formats (`.bin`, `.pdparams`, a
distributed checkpoint; fused, Megatron-Core's, DeepSeek's, Paddle's) are converted once, bit for
bit, into the cache, from which every later job of this machine starts. So are models of text and
images, whose decoder of text is trained as that of its own family.

    folder = readable_weights(Path("Qwen3-30B-A3B-megatron"), cache_dir=None)
"""

import hashlib
import json
import logging
from pathlib import Path

from moe_train.cache import default_cache_dir, locked
from moe_train.errors import TrainValueError
from weight_convert import WeightConvertError, convert, read_catalog
from weight_convert.files import Catalog
from weight_convert.plan import detect_format, spec_of
from weight_convert.specs import Matcher, Side

_LOADED = "transformers"
_TEXT_FORMATS = {"qwen3_vl_moe": "qwen3_moe"}  # in which the decoder of text stands by itself

logger = logging.getLogger(__name__)


def readable_weights(source: Path, cache_dir: str | None) -> Path:
    """The folder to load: `source`, or what it is in transformers' format.

    Every rank calls it; one of each machine converts, the others wait.

    Args:
        source: `model.init_from`.
        cache_dir: `data.cache_dir`; None for the default.

    Raises:
        ValueError: the weights are incomplete, or of another family than `config.json` says.
    """
    try:
        catalog = read_catalog(source)
        spec = spec_of(catalog, None)
    except WeightConvertError:
        return source  # a damaged or unknown folder: the loader says what is wrong with it
    form = detect_format(catalog, spec)
    fused = Matcher([Side(names=(name,), groups=()) for name in spec.experts])
    is_fused = bool(spec.formats[_LOADED].rules) and any(map(fused.find, catalog.tensors))
    target_format = _TEXT_FORMATS.get(spec.model_type, _LOADED)
    stands_so = form == _LOADED or (form == "fused" and not is_fused)
    if catalog.kind == "safetensors" and stands_so and target_format == _LOADED:
        return source
    cache = Path(cache_dir or default_cache_dir())
    name = _identity(catalog)
    target = cache / "weights" / name
    with locked(cache / "locks" / f"{name}.lock"):
        if not target.is_dir():
            what = f"in the format {form} ({catalog.kind} files)"
            logger.info("%s is %s; it is converted once, into %s", source, what, target)
            try:
                convert(source, target, to=target_format)
            except WeightConvertError as error:
                raise TrainValueError(f"model.init_from={source}: {error}") from error
    return target


def left_out(source: Path, model_type: str) -> list[str]:
    """One line where a job takes a part of what `source`, a `config.json` or folder, describes.

    Args:
        source: of another family where a part is taken.
        model_type: of the decoder that is trained.
    """
    file = source / "config.json" if source.is_dir() else source
    named = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    if named == model_type:
        return []
    return [
        f"{source} is of model_type={named!r}; its decoder of text is trained, and saved as "
        f"{model_type!r}: what reads images is left out"
    ]


def _identity(catalog: Catalog) -> str:
    """What tells these files from all others: names, sizes and times."""
    digest = hashlib.sha256(str(catalog.directory.resolve()).encode())
    for name in (*catalog.files, "config.json"):
        state = (catalog.directory / name).stat()
        digest.update(f"{name} {state.st_size} {state.st_mtime_ns};".encode())
    return digest.hexdigest()[:20]
