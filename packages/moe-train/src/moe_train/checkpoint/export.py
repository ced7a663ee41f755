"""The files that make a checkpoint folder a transformers checkpoint, beside its weights."""

import json

from moe_train.config import OWN_TOML, Config, dump_toml
from moe_train.model import DecoderConfig
from moe_train.tokenization import TextTokenizer, model_ids

_TOKENIZER_CONFIG = "tokenizer_config.json"


def checkpoint_files(
    config: Config, model: DecoderConfig, tokenizer: TextTokenizer
) -> dict[str, bytes]:
    """File name -> content: model and generation config, tokenizer, and the run's own config."""
    files = dict(tokenizer.files)
    model = model.with_token_ids(**model_ids(config, tokenizer, model.extra))
    files["config.json"] = model.to_json(config.train.dtype).encode()
    files[OWN_TOML] = dump_toml(config).encode()
    values = json.loads(files[_TOKENIZER_CONFIG])
    if config.model.init_from is None and "model_max_length" not in values:
        values["model_max_length"] = model.max_position_embeddings
        files[_TOKENIZER_CONFIG] = json.dumps(values, indent=2, ensure_ascii=False).encode()
    return files
