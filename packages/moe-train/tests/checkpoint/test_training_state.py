import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_train.checkpoint import rank_tensors
from moe_train.checkpoint.finding import find_checkpoint, newest_checkpoint
from moe_train.checkpoint.trainer_state import TrainerState, read_state
from moe_train.checkpoint.training_state import (
    Checkpointer,
    has_part,
)
from moe_train.config import OWN_TOML, Config, dump_toml
from moe_train.data import Batch
from moe_train.layout import is_expert
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.step import StepRunner
from ranktest import collect_ranks, run_ranks
from unified_ckpt import CheckpointError, Shard, read_index, save
from unified_ckpt.run import manager

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]


def test_a_damaged_part_is_an_error_and_a_missing_one_is_not(tmp_path: Path) -> None:
    shard = Shard.of("w", torch.ones(4), global_shape=(4,), offset=(0,))
    target = tmp_path / "checkpoint-1"
    save({"model": [shard], "master_weights": [shard]}, checkpoint_id=target)
    assert has_part(target, "master_weights")
    assert not has_part(target, "optimizer")
    (weights,) = target.glob("master_weights*.safetensors")
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(CheckpointError, match="master_weights"):
        has_part(target, "master_weights")


def test_a_damaged_newer_checkpoint_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = Shard.of("w", torch.ones(4), global_shape=(4,), offset=(0,))
    for step in (1, 2, 3):
        save({"model": [shard]}, checkpoint_id=tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"torn")
    assert newest_checkpoint(tmp_path) == find_checkpoint(tmp_path, "latest")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert find_checkpoint(tmp_path / "other", str(tmp_path)) == tmp_path / "checkpoint-2"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and len(set(lines)) == 1
    assert lines[0].startswith(f"warning: {tmp_path / 'checkpoint-3'} is passed over")
    assert "model.safetensors: 4 bytes, expected" in lines[0] and "\n" not in lines[0]


def tensors_of(runner: StepRunner, checkpointer: Checkpointer) -> dict[str, Tensor]:
    """Weights, master weights and moments under names that tell them apart."""
    held = {f"weight {n}": t for n, t in checkpointer.parameters.items()}
    held |= {f"master {n}": t for n, t in runner.optimizer.master.items()}
    for moment, tensors in runner.optimizer.moments().items():
        held |= {f"{moment} {n}": t for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def state(step: int = 1) -> TrainerState:
    return TrainerState(
        step=step, consumed_samples=12 * step, data_fingerprint="f", sequence_length=12, seed=0
    )


def saved(config: Config, batches: Batches) -> list[dict[str, Tensor]]:
    """Save checkpoint-2 after two steps; return what each rank held."""

    def run(*_: int) -> dict[str, Tensor]:
        runner, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        at = runner.parallel
        for step in range(2):
            runner.train(batches(config, step, at.sample_rank, at.num_sample_ranks), lr=0.01)
        checkpointer.save(state(2))
        return tensors_of(runner, checkpointer)

    return run_ranks(run, config.world_size)  # type: ignore[return-value]


def loaded(
    config: Config, how: Callable[[Checkpointer], object]
) -> list[tuple[dict[str, Tensor], int, object]]:
    """What each rank holds after `how`, its place among the ep ranks, and what `how` returned."""

    def run(rank: int, _: int) -> object:
        parallel = start(config)
        runner, checkpointer = build_runner(config, read_model_config(config), parallel, {})
        answer = how(checkpointer)
        return tensors_of(runner, checkpointer), parallel.mesh.coordinate(rank)["ep"], answer

    return run_ranks(run, config.world_size)  # type: ignore[return-value]


LOW = ("train.dtype=bfloat16", "train.master_weights=true")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_another_layout_loads_weights_moments_and_master_weights_bit_for_bit(
    configure: Configure, random_batches: Batches, tmp_path: Path, name: str
) -> None:
    own = (*LOW, f"optimizer.name={name}")
    ranks = saved(configure("parallel.pp=2", "parallel.ep=3", *own), random_batches)
    source = tmp_path / "run" / "checkpoint-2"
    ((whole, _, told),) = loaded(configure(*own), lambda c: c.load(source))
    assert told == state(2)
    assert whole.keys() == {name for held in ranks for name in held}
    for rank, held in enumerate(ranks):
        for name, tensor in held.items():
            part = whole[name].chunk(3)[rank % 3] if is_expert(name) else whole[name]
            assert torch.equal(tensor, part), (rank, name)
    last = "momentum_buffer" if name == "muon" else "exp_avg_sq"
    assert any(bool(t.any()) for n, t in whole.items() if n.startswith(last))
    sizes = ("parallel.dp=2", "parallel.ep=2", "train.global_batch_size=8")
    others = loaded(configure(*sizes, *own), lambda c: c.load(source))
    for held, ep, _ in others:
        for name, tensor in held.items():
            part = whole[name].chunk(2)[ep] if is_expert(name) else whole[name]
            assert torch.equal(tensor, part), name


@pytest.mark.parametrize("algorithms", [("adamw", "muon"), ("muon", "adamw")])
def test_moments_of_another_algorithm_start_at_zero_and_all_others_go_on(
    configure: Configure, random_batches: Batches, tmp_path: Path, algorithms: tuple[str, str]
) -> None:
    first, second = (configure(f"optimizer.name={name}") for name in algorithms)
    (before,) = saved(first, random_batches)
    source = tmp_path / "run" / "checkpoint-2"
    (source / OWN_TOML).write_text(dump_toml(first))
    (source / "manifest.json").unlink()  # which would miss the file that a job saves with it
    ((after, _, _),) = loaded(second, lambda c: c.load(source))
    common = before.keys() & after.keys()
    assert common and all(torch.equal(before[name], after[name]) for name in common)
    new = after.keys() - before.keys()
    assert new and not any(after[name].any() for name in new)


def test_without_master_weights_in_the_checkpoint_they_begin_as_the_weights(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    (before,) = saved(configure(*LOW), random_batches)
    source = tmp_path / "run" / "checkpoint-2"
    # As whoever throws them away does: without the manifest, which would find them missing.
    (source / "master_weights.safetensors").unlink()
    (source / "manifest.json").unlink()
    ((after, _, _),) = loaded(configure(*LOW), lambda c: c.load(source))
    masters = [name for name in after if name.startswith("master ")]
    assert masters and not all(torch.equal(before[name], after[name]) for name in masters)
    for name in masters:
        weight = before[name.replace("master ", "weight ")]
        assert torch.equal(after[name], weight.float()), name


def test_weights_alone_are_cast_and_leave_the_moments_at_zero(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    (before,) = saved(configure(), random_batches)
    ((after, _, _),) = loaded(
        configure(*LOW), lambda c: c.load_weights(tmp_path / "run/checkpoint-2")
    )
    for name, tensor in after.items():
        kind, _, rest = name.partition(" ")
        if kind.startswith("exp_avg"):
            assert not bool(tensor.any()), name
        else:
            exact = before[f"weight {rest}"]
            assert torch.equal(tensor, exact if kind == "master" else exact.bfloat16()), name


@pytest.mark.parametrize("sharding", [1, 3])
def test_new_rows_of_vocabulary_are_the_same_means_where_rows_are_shared_out(
    configure: Configure, random_batches: Batches, tmp_path: Path, sharding: int
) -> None:
    saved(configure(), random_batches)
    source = tmp_path / "run" / "checkpoint-2"
    sizes = ("parallel.dp=3", f"parallel.sharding={sharding}")  # 331 rows on three ranks
    ((whole, _, _),) = loaded(configure(*LOW, vocab_size=331), lambda c: c.load_weights(source))
    ranks = loaded(configure(*LOW, *sizes, vocab_size=331), lambda c: c.load_weights(source))
    for name, expected in whole.items():
        parts = [held[name] for held, _, _ in ranks]
        if name.startswith("weight ") and sharding == 1:
            assert all(torch.equal(part, expected) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts), expected), name
    for matrix in ("model.embed_tokens.weight", "lm_head.weight"):
        assert bool(whole[f"master {matrix}"][-1].any())


@pytest.mark.parametrize("sizes", [(), ("parallel.pp=2",)])
def test_stored_weights_that_no_layer_of_any_rank_takes_are_one_line_of_the_log(
    configure: Configure,
    random_batches: Batches,
    tmp_path: Path,
    sizes: tuple[str, ...],
) -> None:
    saved(configure(), random_batches)
    (file,) = (tmp_path / "run" / "checkpoint-2").glob("model*.safetensors")
    copied = ("model.layers.9.embed_tokens.weight", "model.layers.0.rotary_emb.inv_freq")
    extra = {name: torch.ones(2) for name in ("model.layers.0.mlp.gate.scale", *copied)}
    source = tmp_path / "found"
    source.mkdir()
    save_file(load_file(file) | extra, source / "model.safetensors")

    def load(checkpointer: Checkpointer) -> list[str]:
        lines: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = lines.append  # type: ignore[method-assign]
        rank_tensors.logger.addHandler(handler)
        checkpointer.load_weights(source)
        return [line.getMessage() for line in lines]

    ranks = loaded(configure(*sizes, **({"vocab_size": 331} if sizes else {})), load)
    line = f"warning: {source} holds tensors that no layer takes: model.layers.0.mlp.gate.scale"
    assert [lines for _, _, lines in ranks] == [[line], *[[] for _ in ranks[1:]]]


DTYPES = {
    "float32": (),
    "bfloat16": ("train.dtype=bfloat16",),
    "bfloat16 with masters": LOW,
}


@pytest.mark.parametrize("layout", [(), ("parallel.ep=2", "parallel.pp=2")])
@pytest.mark.parametrize("old", DTYPES)
def test_every_dtype_goes_on_as_every_other_from_the_most_exact_weights(
    configure: Configure,
    random_batches: Batches,
    tmp_path: Path,
    old: str,
    layout: tuple[str, ...],
) -> None:
    had = saved(configure(*DTYPES[old], *layout), random_batches)
    for new in DTYPES:
        has = loaded(
            configure(*DTYPES[new], *layout), lambda c: c.load(tmp_path / "run/checkpoint-2")
        )
        for before, (after, _, _) in zip(had, has, strict=True):
            for name, tensor in after.items():
                kind, _, rest = name.partition(" ")
                exact = before.get(f"master {rest}", before.get(f"weight {rest}"))
                if kind == "master":
                    assert torch.equal(tensor, exact.float()), (old, new, name)
                elif kind == "weight" and "bias" not in name:
                    assert torch.equal(tensor, exact.to(tensor.dtype)), (old, new, name)
                elif kind.startswith("exp_avg"):
                    assert torch.equal(tensor, before[name].to(tensor.dtype)), (old, new, name)
            assert any(name.startswith("master ") for name in after) == (
                new == "bfloat16 with masters"
            )


@pytest.mark.parametrize("name", ["trainer_state.json", "samples.json", "optimizer.safetensors"])
def test_a_resume_takes_an_older_checkpoint_when_the_newest_cannot_be_read_at_load_time(
    configure: Configure,
    random_batches: Batches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The newest one was whole when it was chosen; then its disk fails."""
    saved(configure(), random_batches)
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-3")
    choose = manager.checked_checkpoints

    def chosen(*args: Path, **kwargs: str) -> Iterator[tuple[Path, str]]:
        for path, identity in choose(*args, **kwargs):
            if path.name == "checkpoint-3":
                (path / name).unlink()
                (path / name).symlink_to(name)
            yield path, identity

    monkeypatch.setattr(manager, "checked_checkpoints", chosen)

    def resume(*_: int) -> tuple[int, list[str]]:
        config = configure()
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = checkpointer.resume()
        return state.step, [str(warning.message) for warning in caught]

    ((step, said),) = run_ranks(resume, 1)
    assert step == 2 and len(said) == 1, said
    assert "checkpoint-3 is damaged, the next older one is loaded" in said[0]
    assert f"{name}: cannot be read: Too many levels of symbolic links" in said[0]


@pytest.mark.parametrize("fault", ["torn", "another model"])
def test_a_checkpoint_that_cannot_be_loaded_is_one_message_with_the_remedy(
    configure: Configure, random_batches: Batches, tmp_path: Path, fault: str
) -> None:
    saved(configure(), random_batches)
    source = tmp_path / "run/checkpoint-2"
    if fault == "torn":
        (source / "optimizer.safetensors").write_bytes(b"torn")

    def run(*_: int) -> None:
        config = configure(**({} if fault == "torn" else {"moe_intermediate_size": 8}))
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        checkpointer.load(source)

    (outcome,) = collect_ranks(run, 1)
    assert outcome.error is not None and "TrainValueError: " in outcome.error
    named = "optimizer.safetensors" if fault == "torn" else "model.layers.0.mlp.experts"
    assert named in outcome.error and "--resume an older checkpoint" in outcome.error


def test_a_named_checkpoint_that_is_replaced_while_it_is_read_is_an_error_on_every_rank(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    """Tensors of one, and the trainer state of another, would be a state that never was."""
    saved(configure(), random_batches)
    source = tmp_path / "run/checkpoint-2"
    shutil.copytree(source, tmp_path / "other")
    config = configure("parallel.dp=2")

    def run(rank: int, _: int) -> None:
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        load_weights = checkpointer._load_weights

        def replaced_behind(path: Path) -> None:
            load_weights(path)
            if rank == 1:
                source.rename(tmp_path / "before")
                (tmp_path / "other").rename(source)
            dist.barrier()  # in between there is nothing, and that would be another error

        with mock.patch.object(Checkpointer, "_load_weights", lambda _, p: replaced_behind(p)):
            checkpointer.load(source)

    for outcome in collect_ranks(run, 2):
        assert outcome.error is not None and "TrainValueError: " in outcome.error
        assert "checkpoint-2 was replaced while it was read" in outcome.error


def test_every_rank_draws_on_with_its_own_random_numbers(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("parallel.dp=2")

    def draw(rank: int, _: int) -> list[list[float]]:
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        torch.manual_seed(100 + rank)
        torch.rand(rank + 5)
        target = checkpointer.save(state())
        drawn = torch.rand(4).tolist()
        torch.manual_seed(0)
        checkpointer.load(target)
        return [drawn, torch.rand(4).tolist()]

    first, second = run_ranks(draw, 2)  # type: ignore[misc]
    assert first[0] == first[1] != second[0] == second[1]


def test_random_numbers_of_a_checkpoint_from_before_random_state_files_are_read(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    saved(configure(), random_batches)
    source = tmp_path / "run" / "checkpoint-2"
    kept = {"model.safetensors", "optimizer.safetensors", "trainer_state.json"}
    for path in source.iterdir():
        if path.name not in kept:
            path.unlink()
    state_before = torch.Generator().manual_seed(77).get_state()
    save_file({"cpu": state_before}, source / "rng-rank-00000.safetensors")

    def draw(*_: int) -> list[float]:
        config = configure()
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        checkpointer.load(source)
        return torch.rand(4).tolist()

    expected = torch.rand(4, generator=torch.Generator().manual_seed(77)).tolist()
    assert run_ranks(draw, 1) == [expected]


def test_a_checkpoint_of_fewer_ranks_leaves_the_new_ranks_their_random_numbers(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    saved(configure(), random_batches)
    config = configure("parallel.dp=2")

    def draw(*_: int) -> tuple[list[float], list[float]]:
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        torch.manual_seed(5)
        expected = torch.rand(4).tolist()
        torch.manual_seed(5)
        checkpointer.load(tmp_path / "run/checkpoint-2")
        return expected, torch.rand(4).tolist()

    (expected, restored), (kept, same) = run_ranks(draw, 2)  # type: ignore[misc]
    assert restored != expected and kept == same


def test_the_newest_checkpoints_are_kept(configure: Configure, tmp_path: Path) -> None:
    config = configure("checkpoint.save_total_limit=2", "parallel.ep=2")

    def run(*_: int) -> None:
        _, checkpointer = build_runner(config, read_model_config(config), start(config), {})
        for step in (1, 2, 10, 11):
            checkpointer.save(state(step))

    run_ranks(run, 2)
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-10", "checkpoint-11"}
    assert read_state(tmp_path / "run/checkpoint-11") == state(11)


@pytest.mark.parametrize("low", [(), LOW])
def test_another_set_of_trained_parameters_goes_on_with_the_moments_that_there_are(
    configure: Configure, random_batches: Batches, tmp_path: Path, low: tuple[str, ...]
) -> None:
    first = configure(*low, 'train.trainable=["*.layers.1.*"]')

    def run(config: Config, source: Path | None, steps: range) -> dict[str, Tensor]:
        """Train `steps`, after a resume, and save."""
        files = {OWN_TOML: dump_toml(config).encode()}
        model = read_model_config(config)
        runner, checkpointer = build_runner(config, model, start(config), files)
        if source is not None:
            assert checkpointer.load(source).step == steps.start
        before = tensors_of(runner, checkpointer)
        at = runner.parallel
        for step in steps:
            runner.train(random_batches(config, step, at.sample_rank, at.num_sample_ranks), lr=0.01)
        checkpointer.save(state(steps.stop))
        counts = {
            f"updates {piece.name}": count.clone()
            for piece, count in runner.optimizer._num_updates_of.items()
        }
        return {
            **tensors_of(runner, checkpointer),
            **counts,
            **{f"before {n}": t for n, t in before.items()},
        }

    folder = tmp_path / "run"
    (held,) = run_ranks(lambda *_: run(first, None, range(2)), 1)
    stored = read_index(folder / "checkpoint-2", "model").keys()
    assert any(".layers.0." in key for key in stored), "frozen weights are not saved"
    moments = read_index(folder / "checkpoint-2", "optimizer").keys()
    assert moments and all(".layers.1." in key for key in moments)

    layout = ("parallel.pp=2", "parallel.ep=2")
    second = configure(*low, *layout, 'train.trainable=["*.layers.1.*", "*.layers.0.mlp.*"]')
    source = folder / "checkpoint-2"
    ranks = run_ranks(lambda *_: run(second, source, range(2, 3)), 4)
    for rank in ranks:
        for name, tensor in rank.items():  # type: ignore[attr-defined]
            kind, _, rest = name.partition("before exp_avg")
            if not kind and "layers.0" in rest:
                assert not tensor.any(), "moments of what was frozen do not start at zero"
            elif not kind and not is_expert(rest):
                assert torch.equal(tensor, held[name.removeprefix("before ")])  # type: ignore[index]
            if name.startswith("updates"):
                assert int(tensor) == (1 if "layers.0" in name else 3), name

    again = configure(*low, 'train.trainable=["*.layers.0.mlp.gate.weight", "lm_head.weight"]')
    source = folder / "checkpoint-3"
    (last,) = run_ranks(lambda *_: run(again, source, range(3, 4)), 1)
    counts = {name: int(t) for name, t in last.items() if name.startswith("updates")}  # type: ignore[attr-defined]
    assert counts == {"updates model.layers.0.mlp.gate.weight": 2, "updates lm_head.weight": 1}


def test_moments_that_a_job_without_frozen_parameters_lacks_are_an_error(
    configure: Configure, random_batches: Batches, tmp_path: Path
) -> None:
    saved(configure('train.trainable=["lm_head.weight"]'), random_batches)
    with pytest.raises(AssertionError, match="exp_avg"):
        loaded(configure(), lambda c: c.load(tmp_path / "run" / "checkpoint-2"))
