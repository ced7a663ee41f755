from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Box, Shard, load, read_index, save
from unified_ckpt.errors import LoadError
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.plans.checkpoint.directory import Checkpoint

MASTER = torch.randn(4, 3)
WEIGHT = MASTER.bfloat16()
BIAS = torch.randn(4)  # fp32 already, so it has no master weight


def state() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"w": WEIGHT.clone(), "router.bias": BIAS.clone()},
        "master_weights": {"w": MASTER.clone()},
        "optimizer": {"w/moment1": MASTER * 2, "w/moment2": MASTER.square()},
    }


def zeros(*parts: str) -> dict[str, dict[str, torch.Tensor]]:
    return {part: {k: v * 0 for k, v in state()[part].items()} for part in parts}


def test_skip_save_model_weight_leaves_out_what_the_master_weights_hold(tmp_path: Path) -> None:
    options = SaveOptions(skip_save_model_weight=True)
    save(state(), checkpoint_id=tmp_path / "c", options=options)
    assert set(read_index(tmp_path / "c")) == {"router.bias"}
    back = zeros("model", "master_weights")
    load(back, checkpoint_id=tmp_path / "c")
    assert torch.equal(back["model"]["w"], WEIGHT)
    assert torch.equal(back["model"]["router.bias"], BIAS)
    assert torch.equal(back["master_weights"]["w"], MASTER)


def test_skip_save_model_weight_asks_all_ranks_for_master_weights(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        parts = {"model": {"w": WEIGHT}} | ({"master_weights": {"w": MASTER}} if rank else {})
        options = SaveOptions(skip_save_model_weight=True)
        save(parts, checkpoint_id=tmp_path / "c", options=options)
        assert set(read_index(tmp_path / "c")) == set()
        with pytest.raises(ValueError, match=r"'w' is \(4, 3\) in 'model', but \(12,\)"):
            flat = {"model": {"w": WEIGHT}, "master_weights": {"w": MASTER.view(-1)}}
            save(flat, checkpoint_id=tmp_path / "d", options=options)

    run_ranks(fn, 2)


def test_without_the_option_a_missing_model_weight_is_missing(tmp_path: Path) -> None:
    held = state()
    del held["model"]["w"]
    save(held, checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadError, match="part 'model' lacks 'w'"):
        load(zeros("model"), checkpoint_id=tmp_path / "c")


def test_remove_master_weight_does_not_write_them(tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path / "c", options=SaveOptions(remove_master_weight=True))
    assert Checkpoint(tmp_path / "c").parts() == ["model", "optimizer"]
    with pytest.raises(LoadError, match="no part 'master_weights'"):
        load(zeros("master_weights"), checkpoint_id=tmp_path / "c")
    back = zeros("master_weights")
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(master_weight_compatible=True))
    assert torch.equal(back["master_weights"]["w"], WEIGHT.float())


def test_master_weight_compatible_prefers_the_stored_ones(tmp_path: Path) -> None:
    held = state()
    held["model"]["v"] = WEIGHT * 3
    save(held, checkpoint_id=tmp_path / "c")
    back = {"master_weights": {"w": MASTER * 0, "v": MASTER * 0}}
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(master_weight_compatible=True))
    assert torch.equal(back["master_weights"]["w"], MASTER)
    assert torch.equal(back["master_weights"]["v"], (WEIGHT * 3).float())


def test_remove_master_weight_on_load_makes_all_from_the_model(tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path / "c")
    back = zeros("master_weights")
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(remove_master_weight=True))
    assert torch.equal(back["master_weights"]["w"], WEIGHT.float())


def test_skipping_both_would_lose_the_weights() -> None:
    with pytest.raises(ValueError, match="together would save no weights"):
        SaveOptions(skip_save_model_weight=True, remove_master_weight=True)


def split_save(folder: Path, options: SaveOptions, *, flat: bool) -> None:
    """Two ranks hold halves of `w`, as rows or as uneven flat ranges; rank 0 writes `b`."""

    def fn(rank: int, world_size: int) -> None:
        def half(key: str, whole: torch.Tensor) -> Shard:
            if not flat:
                rows = whole[rank * 2 : rank * 2 + 2]
                return Shard.of(key, rows, global_shape=(4, 3), offset=(2 * rank, 0))
            begin, end = [(0, 5), (5, 12)][rank]
            return Shard(
                key=key,
                tensor=whole.reshape(-1)[begin:end],
                box=Box((4, 3), (0, 0), (4, 3), (begin, end)),
            )

        parts = {
            "model": [half("w", WEIGHT)],
            "optimizer": [half("w/moment1", MASTER * 2), half("w/moment2", MASTER.square())],
        }
        if rank == 0:
            bias = Shard.of("b/moment1", BIAS, global_shape=(4,), offset=(0,))
            parts["optimizer"].append(bias)
        save(parts, checkpoint_id=folder, options=options)

    run_ranks(fn, 2)


@pytest.mark.parametrize("flat", [False, True])
def test_ignore_merge_optimizer_keeps_boxes_sharded_in_files_of_one_rank(
    flat: bool, tmp_path: Path
) -> None:
    split_save(tmp_path / "c", SaveOptions(ignore_merge_optimizer=True), flat=flat)
    keys = set(read_index(tmp_path / "c", "optimizer"))
    assert "w/moment1" not in keys and "b/moment1" in keys
    if not flat:
        assert keys == {"b/moment1"} | {
            f"w/moment{n}@{box}@4,3" for n in (1, 2) for box in ("0:2,0:3", "2:4,0:3")
        }
    assert set(read_index(tmp_path / "c")) == {"w"}  # the model stays as transformers reads it
    back = {
        "model": {"w": WEIGHT * 0},
        "optimizer": {"w/moment1": MASTER * 0, "w/moment2": MASTER * 0, "b/moment1": BIAS * 0},
    }
    report = load(back, checkpoint_id=tmp_path / "c")
    assert torch.equal(back["optimizer"]["w/moment1"], MASTER * 2)
    assert torch.equal(back["optimizer"]["w/moment2"], MASTER.square())
    assert torch.equal(back["optimizer"]["b/moment1"], BIAS)
    assert report.num_bytes == 24 + 48 * 2 + 16
    columns = torch.zeros(4, 1)
    want = Shard.of("w/moment1", columns, global_shape=(4, 3), offset=(0, 1))
    load([want], checkpoint_id=tmp_path / "c", part="optimizer")
    assert torch.equal(columns, MASTER[:, 1:2] * 2)


def test_gather_split_param_decides_about_flat_ranges_only(tmp_path: Path) -> None:
    for flat, gather in [(True, True), (True, False), (False, False)]:
        folder = tmp_path / f"{flat}-{gather}"
        split_save(folder, SaveOptions(gather_split_param=gather), flat=flat)
        whole = "w/moment1" in read_index(folder, "optimizer")
        assert whole == (gather or not flat)
        back = MASTER * 0
        load({"optimizer": {"w/moment1": back}}, checkpoint_id=folder)
        assert torch.equal(back, MASTER * 2)


def test_holes_are_found_also_where_boxes_are_kept_sharded(tmp_path: Path) -> None:
    lone = Shard.of("w/moment1", MASTER[:2], global_shape=(4, 3), offset=(0, 0))
    with pytest.raises(ValueError, match=r"optimizer 'w/moment1'.*no rank holds 6"):
        save(
            {"optimizer": [lone]},
            checkpoint_id=tmp_path / "c",
            options=SaveOptions(ignore_merge_optimizer=True),
        )


def test_ignored_keys_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    held = {"model": {"a.inv_freq": BIAS, "a.w": BIAS}, "extra": {"when": object()}, "n": 1}
    save(
        held, checkpoint_id=tmp_path / "c", options=SaveOptions(ignored_keys=(r"inv_freq$", "when"))
    )
    assert set(read_index(tmp_path / "c")) == {"a.w"}
    back = {"model": {"a.inv_freq": BIAS * 0, "a.w": BIAS * 0}, "n": 0}
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(ignored_keys=(r"inv_freq", "^n$")))
    assert back["model"]["a.inv_freq"].count_nonzero() == 0 and back["n"] == 0
    assert torch.equal(back["model"]["a.w"], BIAS)
    with pytest.raises(ValueError, match="no regular expression"):
        SaveOptions(ignored_keys=("(",))
    with pytest.raises(TypeError, match="tuple of regular expressions"):
        LoadOptions(ignored_keys="abc")  # type: ignore[arg-type]


def test_options_must_agree_over_ranks(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        options = SaveOptions(ignore_merge_optimizer=bool(rank))
        with pytest.raises(ValueError, match="ranks disagree about options"):
            save({"model": {}}, checkpoint_id=tmp_path / "c", options=options)

    run_ranks(fn, 2)
    with pytest.raises(ValueError, match="'b' stands for 'a', which is an alias itself"):
        SaveOptions(tied={"b": "a", "a": "c"})
