"""The files that make a checkpoint folder a transformers checkpoint, beside its weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from moe_train.config import Config, dump_toml
from moe_train.model import DecoderConfig


def checkpoint_files(
    config: Config, model: DecoderConfig, tokenizer_file: Path
) -> dict[str, bytes]:
    """File name -> content: model and generation config, tokenizer, and the run's own config."""
    text = tokenizer_file.read_bytes()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = None if model.eos_token_id is None else tokenizer.id_to_token(model.eos_token_id)
    ends = list(model.eos_token_ids)
    generation: dict[str, object] = {
        "eos_token_id": ends if len(ends) > 1 else model.eos_token_id,
        "do_sample": True,
    }
    if end is not None:
        generation["pad_token_id"] = model.eos_token_id
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end, "pad_token": end} if end is not None else {}),
    }
    return {
        "config.json": model.to_json(config.train.dtype).encode(),
        "generation_config.json": _json(generation),
        "tokenizer.json": text,
        "tokenizer_config.json": _json(tokenizer_config),
        "moe_train.toml": dump_toml(config).encode(),
    }


def _json(values: dict[str, object]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
