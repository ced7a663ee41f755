from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_train.checkpoint.parts import read_part
from moe_train.config import Config
from moe_train.layout import has_new_rows, load_first_rows, single_rank_layouts, stage_tensors
from moe_train.layout.parameters import stored_tensors
from moe_train.model import EMBEDDING, DecoderStage, StageOptions
from moe_train.training import read_model_config
from unified_ckpt import save

Configure = Callable[..., Config]


def stage_of(config: Config, rows: int) -> DecoderStage:
    model = read_model_config(config).with_vocab_size(rows)
    return DecoderStage(model, StageOptions(layers=range(2), first=True, last=True))


def test_new_rows_are_the_mean_and_the_others_keep_their_place(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure()
    old, new = stage_of(config, 320), stage_of(config, 384)
    stored = stored_tensors(single_rank_layouts(old, old.config), stage_tensors(old), rank=0)
    source = tmp_path / "source"
    save({"model": stored.shards}, checkpoint_id=source)
    layouts, tensors = single_rank_layouts(new, new.config), stage_tensors(new)
    grown = {name for name, layout in layouts.items() if has_new_rows(layout, source)}
    assert grown == {EMBEDDING, "lm_head.weight"}
    for name in grown:
        load_first_rows(
            *(layouts[name], tensors[name], source),
            rank=0,
            load=lambda fewer: read_part(source, "model", [fewer]),
        )
        before = stage_tensors(old)[name]
        assert torch.equal(tensors[name][:320], before)
        torch.testing.assert_close(tensors[name][320:], before.mean(0).expand(64, -1))
    smaller = stage_of(config, 256)
    with pytest.raises(ValueError, match="has 256 rows and its checkpoint 320; a voc"):
        has_new_rows(single_rank_layouts(smaller, smaller.config)[EMBEDDING], source)
