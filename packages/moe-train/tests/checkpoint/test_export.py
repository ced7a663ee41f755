import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from moe_train.checkpoint.export import checkpoint_files
from moe_train.config import Config, load_config
from moe_train.data import prepare
from moe_train.training import read_model_config

Configure = Callable[..., Config]


def files_of(config: Config) -> dict[str, bytes]:
    return checkpoint_files(config, read_model_config(config), prepare(config).tokenizer)


def test_the_files_hold_the_model_the_tokenizer_and_the_job(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("train.dtype=bfloat16", "train.seed=8", made_by="somebody")
    files = files_of(config)
    model = json.loads(files["config.json"])
    given = json.loads((tmp_path / "config.json").read_text())
    assert given.items() <= model.items()
    assert "bfloat16" in (model.get("dtype"), model.get("torch_dtype"))
    assert files["tokenizer.json"] == prepare(config).tokenizer_file.read_bytes()
    saved = tmp_path / "moe_train.toml"
    saved.write_bytes(files["moe_train.toml"])
    assert load_config(saved) == config


def test_text_ends_at_the_token_between_documents(configure: Configure) -> None:
    config = configure()
    tokenizer = Tokenizer.from_file(str(prepare(config).tokenizer_file))
    files = files_of(config)
    generation, tokens = (
        json.loads(files[name]) for name in ("generation_config.json", "tokenizer_config.json")
    )
    assert generation["eos_token_id"] == generation["pad_token_id"] == 0
    assert tokens["eos_token"] == tokens["pad_token"] == tokenizer.id_to_token(0)


def test_config_json_is_written_to_agree_with_the_end_token(configure: Configure) -> None:
    for given in (2, [0, 7], None):
        files = files_of(configure(eos_token_id=given))
        for name in ("config.json", "generation_config.json"):
            assert json.loads(files[name])["eos_token_id"] == 0
