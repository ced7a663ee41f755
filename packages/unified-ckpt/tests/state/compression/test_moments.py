import random
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Box, Shard, load, read_index, save
from unified_ckpt.options import SaveOptions
from unified_ckpt.state.compression.moments import BLOCK, dequantize, quantize

INT8 = SaveOptions(moment_compression="int8")


def blocks_of(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each element's block."""
    flat = values.reshape(-1).abs()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1).repeat_interleave(BLOCK)[: len(flat)].view(values.shape)


def check_bounds(found: torch.Tensor, values: torch.Tensor, moment: str) -> None:
    if moment == "moment1":
        bound = blocks_of(values) / 254 * (1 + 1e-5) + 1e-37
        assert ((found - values).abs() <= bound).all()
    else:
        roots = values.sqrt()
        bound = blocks_of(roots) / 255 * (1 + 1e-5) + 1e-37
        assert ((found.sqrt() - roots).abs() <= bound).all()
        normal = values > 1e-30
        assert (found[normal] > 0).all() and (found[values == 0] == 0).all()


@pytest.mark.parametrize("moment", ["moment1", "moment2"])
def test_the_error_is_within_the_stated_bound(moment: str) -> None:
    seed = random.randrange(2**32)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    for shape in [(1,), (64,), (65,), (7, 31), (3, 5, 20), (0, 4)]:
        for scale in (1e-30, 1e-8, 1.0, 1e20):
            values = torch.randn(shape) * scale * torch.rand(shape).pow(8)
            values[..., ::3] = 0
            values = values.square().clamp(max=1e30) if moment == "moment2" else values
            codes, scales = quantize(values, moment)
            assert codes.shape == values.shape and codes.element_size() == 1
            box = dequantize(codes, scales, moment, offset=(0,) * values.dim(), box_shape=shape)
            check_bounds(box, values, moment)


def test_the_error_is_no_smaller_than_eight_bits_give() -> None:
    """The bound is tight: half a step is reached, so no better claim could be made."""
    values = torch.linspace(-1, 1, BLOCK)
    codes, scales = quantize(values, "moment1")
    error = (dequantize(codes, scales, "moment1", offset=(0,), box_shape=(BLOCK,)) - values).abs()
    assert error.max() > 0.8 / 254


def test_moments_that_are_not_finite_or_negative_are_refused(tmp_path: Path) -> None:
    for values, key in [
        (torch.tensor([1.0, float("nan")]), "w/moment1"),
        (-torch.ones(2), "w/moment2"),
    ]:
        with pytest.raises(ValueError, match=f"'{key}': moment_compression='int8' needs finite"):
            save({"optimizer": {key: values}}, checkpoint_id=tmp_path / "c", options=INT8)
    assert not list(tmp_path.iterdir())


def test_compressed_moments_are_a_quarter_and_load_under_any_layout(tmp_path: Path) -> None:
    m, v = torch.randn(40, 96), torch.rand(40, 96)
    cuts = {"rows": [(0, 13, 0, 96), (13, 27, 0, 96)], "flat": [(0, 1000), (1000, 3840)]}

    def parts(kind: str, rank: int) -> dict[str, list[Shard]]:
        shards = []
        for name, whole in (("moment1", m), ("moment2", v)):
            if kind == "flat":
                begin, end = cuts[kind][rank]
                shards.append(
                    Shard(
                        key=f"w/{name}",
                        tensor=whole.view(-1)[begin:end],
                        box=Box((40, 96), (0, 0), (40, 96), (begin, end)),
                    )
                )
            else:
                row, n, _, _ = cuts[kind][rank]
                shards.append(
                    Shard.of(
                        f"w/{name}", whole[row : row + n], global_shape=(40, 96), offset=(row, 0)
                    )
                )
        step = Shard.of("w/step", torch.tensor(3.0), global_shape=(), offset=())
        return {"optimizer": [*shards, step]}

    for kind in cuts:
        folder = tmp_path / kind

        def saves(rank: int, world_size: int, kind: str = kind, folder: Path = folder) -> None:
            save(parts(kind, rank), checkpoint_id=folder, options=INT8)

        run_ranks(saves, 2)
        index = read_index(folder, "optimizer")
        assert (index["w/moment1"].dtype, index["w/moment2"].dtype) == ("I8", "U8")
        stored_bytes = sum(stored.end - stored.begin for stored in index.values())
        assert stored_bytes < 0.27 * 2 * m.numel() * 4
        back = {f"w/{n}": torch.zeros(40, 96) for n in ("moment1", "moment2")}
        load({"optimizer": {**back, "w/step": torch.tensor(0.0)}}, checkpoint_id=folder)
        # A block lies inside a box, so a whole-tensor bound is the loosest that can hold.
        assert ((back["w/moment1"] - m).abs() <= m.abs().max() / 254 * 1.001).all()
        assert ((back["w/moment2"].sqrt() - v.sqrt()).abs() <= v.sqrt().max() / 255 * 1.001).all()
        for offset, shape in [((5, 7), (20, 30)), ((0, 95), (40, 1)), ((39, 0), (1, 96))]:
            part = torch.zeros(shape)
            want = Shard.of("w/moment1", part, global_shape=(40, 96), offset=offset)
            load([want], checkpoint_id=folder, part="optimizer")
            rows, columns = (slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            assert torch.equal(part, back["w/moment1"][rows, columns])


def test_a_fresh_optimizer_gets_fp32_moments_from_a_compressed_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(70, 3)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(2, 70)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c", options=INT8)
    fresh = torch.optim.AdamW(torch.nn.Linear(70, 3).named_parameters())
    load({"optimizer": fresh}, checkpoint_id=tmp_path / "c")
    pairs = zip(fresh.state.values(), optimizer.state.values(), strict=True)
    for mine, theirs in pairs:
        assert mine["exp_avg"].dtype == torch.float32
        check_bounds(mine["exp_avg"], theirs["exp_avg"], "moment1")
        check_bounds(mine["exp_avg_sq"], theirs["exp_avg_sq"], "moment2")


def test_empty_moments_are_not_compressed_and_come_back(tmp_path: Path) -> None:
    moments = {"w/moment1": torch.zeros(0, 3), "v/moment1": torch.ones(3)}
    options = SaveOptions(moment_compression="int8")
    save({"optimizer": moments}, checkpoint_id=tmp_path / "c", options=options)
    back = {key: tensor * 0 for key, tensor in moments.items()}
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert torch.allclose(back["v/moment1"], moments["v/moment1"])
    assert read_index(tmp_path / "c", "optimizer")["w/moment1"].dtype == "F32"


def test_moments_under_torchs_names_are_compressed_too(tmp_path: Path) -> None:
    """As a trainer stores them that hands in shards instead of an optimizer."""
    moments = {"w/exp_avg": torch.randn(9, 70), "w/exp_avg_sq": torch.rand(9, 70)}
    save({"optimizer": moments}, checkpoint_id=tmp_path / "c", options=INT8)
    index = read_index(tmp_path / "c", "optimizer")
    assert [index[key].dtype for key in moments] == ["I8", "U8"]
    back = {key: torch.zeros(9, 70) for key in moments}
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    check_bounds(back["w/exp_avg"], moments["w/exp_avg"], "moment1")
    check_bounds(back["w/exp_avg_sq"], moments["w/exp_avg_sq"], "moment2")


def test_other_states_and_bits_stay_as_they_are(tmp_path: Path) -> None:
    state = {
        "w/max_exp_avg_sq": torch.rand(9),
        "w/moment1": torch.arange(9),
        "moment1": torch.rand(3),
    }
    save({"optimizer": state}, checkpoint_id=tmp_path / "c", options=INT8)
    back = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_compression_and_boxes_kept_sharded_go_together(tmp_path: Path) -> None:
    m = torch.randn(6, 70)
    halves = [
        Shard.of("w/moment1", m[r], global_shape=(6, 70), offset=(r.start, 0))
        for r in (slice(0, 1), slice(1, 6))
    ]
    options = SaveOptions(moment_compression="int8", ignore_merge_optimizer=True)
    save({"optimizer": halves}, checkpoint_id=tmp_path / "c", options=options)
    back = torch.zeros(6, 70)
    load({"optimizer": {"w/moment1": back}}, checkpoint_id=tmp_path / "c")
    for rows in (slice(0, 1), slice(1, 6)):
        check_bounds(back[rows], m[rows], "moment1")


@pytest.mark.gpu
def test_moments_on_a_device_are_compressed_and_loaded_there(tmp_path: Path) -> None:
    m = torch.randn(5, 70, device="cuda")
    save({"optimizer": {"w/moment1": m}}, checkpoint_id=tmp_path / "c", options=INT8)
    back = torch.zeros_like(m)
    load({"optimizer": {"w/moment1": back}}, checkpoint_id=tmp_path / "c")
    check_bounds(back.cpu(), m.cpu(), "moment1")
