"""The files that make a checkpoint folder a transformers checkpoint, beside its weights."""

from moe_train.config import OWN_TOML, Config, dump_toml
from moe_train.model import DecoderConfig
from moe_train.tokenization import TextTokenizer


def checkpoint_files(
    config: Config, model: DecoderConfig, tokenizer: TextTokenizer
) -> dict[str, bytes]:
    """File name -> content: model and generation config, tokenizer, and the run's own config."""
    files = dict(tokenizer.files)
    if not model.eos_token_ids or not set(model.eos_token_ids) <= set(tokenizer.eos_token_ids):
        model = model.with_token_ids(eos_token_id=tokenizer.eos_token_ids)
    files["config.json"] = model.to_json(config.train.dtype).encode()
    files[OWN_TOML] = dump_toml(config).encode()
    return files
