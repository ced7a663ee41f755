"""One training job: what is checked before any rank starts, and what each rank then runs.

source = check(config, resume)     # once, in the launching process; raises for every known mistake
train(config, str(source or ""), context)                                          # on every rank
"""

import os
from pathlib import Path

import torch.distributed as dist
from tokenizers import Tokenizer

from moe_train.checkpoint import check_same_data, find_checkpoint, read_state
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig, stage_layers
from moe_train.parallel import choose_device, start
from moe_train.rank import RankContext
from moe_train.report import MetricsLog, ProgressLine, write_plots
from moe_train.training import (
    Position,
    Reporter,
    TrainingLoop,
    build_training,
    check_balancing,
    open_splits,
    read_model_config,
    training_schedule,
)
from unified_ckpt import CheckpointError, read_index
from unified_ckpt.folders import check_steps_free


def check(config: Config, resume: str) -> Path | None:
    """Refuse what cannot work, before any process starts; prepares the corpus on the way.

    Returns:
        The checkpoint that the job goes on from; None for a new run.

    Raises:
        ValueError: one message with what was given, what is expected and what to change.
    """
    model = read_model_config(config)
    check_model(config, model)
    choose_device(config.train.device)
    folder = Path(config.train.output_dir)
    source = find_checkpoint(folder, resume)
    _check_output_folder(folder, source)
    if source is not None:
        _check_checkpoint(source)
    prepared = prepare(config)
    size = Tokenizer.from_file(str(prepared.tokenizer_file)).get_vocab_size()
    if size > model.vocab_size:
        raise TrainValueError(
            f"the tokenizer {prepared.tokenizer_file.name} has {size} tokens but the model's "
            f"vocab_size={model.vocab_size}; lower tokenizer.vocab_size to {model.vocab_size} or "
            "use a model config with a larger vocabulary"
        )
    open_splits(config, prepared)
    if source is not None:
        state = read_state(source)
        now = {
            "data_fingerprint": prepared.fingerprint,
            "sequence_length": config.data.sequence_length,
            "seed": config.train.seed,
        }
        check_same_data(state, now, source)
        if state.step >= config.train.max_steps:
            raise TrainValueError(
                f"{source} is at step {state.step} and train.max_steps={config.train.max_steps}; "
                "raise train.max_steps to train further"
            )
        check_steps_free(folder, range(state.step + 1, config.train.max_steps + 1))
    return source


def check_model(config: Config, model: DecoderConfig) -> None:
    """Check the decoder against the layout.

    Raises:
        ValueError: layers, experts or positions do not fit the layout or the data, or balancing
            does not fit the schedule or the family.
    """
    parallel = config.parallel
    stage_layers(model.num_hidden_layers, parallel.pp, 0)
    check_balancing(config, model, training_schedule(config))
    if model.num_experts % parallel.ep:
        choices = [str(d) for d in range(1, model.num_experts + 1) if model.num_experts % d == 0]
        raise TrainValueError(
            f"parallel.ep={parallel.ep} ranks cannot share num_experts={model.num_experts} evenly; "
            f"choose ep among {', '.join(choices)}"
        )
    if config.data.sequence_length > model.max_position_embeddings:
        raise TrainValueError(
            f"data.sequence_length={config.data.sequence_length} exceeds the model's "
            f"max_position_embeddings={model.max_position_embeddings}; shorten the sequences"
        )


def train(config: Config, resume: str, context: RankContext) -> None:
    """Train on this rank until the end or a request to stop. Collective over all ranks.

    Args:
        config: the job.
        resume: "", "latest" or a checkpoint folder.
        context: asked after every step; any rank's request stops all of them with a checkpoint.
    """
    parallel = start(config)
    training = build_training(config, parallel)
    folder = Path(config.train.output_dir)
    checkpointer, position = training.checkpointer, Position()
    reporter: Reporter | None = None
    try:
        if resume:
            latest = resume == "latest"
            state = checkpointer.resume() if latest else checkpointer.load(Path(resume))
            position = Position(state.step, state.consumed_samples)
            context.step = position.step
        elif config.model.init_from is not None:
            checkpointer.load_weights(Path(config.model.init_from))
        if parallel.rank == 0:
            reporter = _reporter(config, position)
        saved = TrainingLoop(config, training, reporter, position).run(context)
    finally:
        checkpointer.close()
        if reporter is not None:
            reporter.close()
    if parallel.rank == 0:
        _finish(config, folder, saved)
    dist.barrier()
    dist.destroy_process_group()


def _reporter(config: Config, position: Position) -> Reporter:
    folder = Path(config.train.output_dir)
    metrics = MetricsLog(folder, tensorboard=config.log.tensorboard, resume_step=position.step)
    return Reporter(metrics, ProgressLine(config.train.max_steps, config.log.progress))


def _finish(config: Config, folder: Path, saved: Path | None) -> None:
    written = [folder / "metrics.jsonl"]
    if config.log.plots:
        written += write_plots(folder / "metrics.jsonl", folder)
    if saved is not None:
        written.append(saved)
    print("results:", *(f"\n  {path}" for path in written), flush=True)


def _check_checkpoint(source: Path) -> None:
    try:
        for part in ("model", "optimizer"):
            read_index(source, part)
    except CheckpointError as error:
        raise TrainValueError(f"--resume: {error}") from error


def _check_output_folder(folder: Path, source: Path | None) -> None:
    """A run must not write its checkpoints between those of another."""
    if source is None and any(folder.glob("checkpoint-*")):
        raise TrainValueError(
            f"train.output_dir={folder} already holds checkpoints; pass --resume to continue that "
            "run, or choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise TrainValueError(f"train.output_dir={folder} is not writable; choose another folder")
