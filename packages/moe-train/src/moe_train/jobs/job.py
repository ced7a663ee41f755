"""One training job: what is checked before any rank starts, and what each rank then runs.

source = check(config, resume)     # once, in the launching process; raises for every known mistake
train(config, str(source or ""), context)                                          # on every rank
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from moe_train.checkpoint import Checkpointer, TrainerState, find_checkpoint, read_state
from moe_train.config import Config, KeyChange
from moe_train.data import PreparedCorpus, prepare
from moe_train.early_checks import (
    HOLDS_CHECKPOINTS,
    ModelSizes,
    check_run_folders,
    check_sizes,
)
from moe_train.errors import TrainValueError
from moe_train.idle_keys import idle_keys
from moe_train.init_source import left_out, readable_weights
from moe_train.jobs.first_failure import naming_first_failure
from moe_train.jobs.resume import describe_resume, refuse_changes
from moe_train.jobs.signs_of_life import SignsOfLife
from moe_train.jobs.space import check_space
from moe_train.layout import chosen_names
from moe_train.model import DecoderConfig
from moe_train.parallel import choose_device, start
from moe_train.rank import RankContext, rank_number
from moe_train.report import MetricsLog, ProgressLine, phase, write_plots
from moe_train.tokenization import TextTokenizer, describe_choice
from moe_train.training import (
    TIMELINE_FILE,
    Reporter,
    TrainingLoop,
    build_training,
    check_layout,
    open_splits,
    read_model_config,
    rules_of_job,
)
from moe_train.training.memory import RankMemory
from unified_ckpt import CheckpointError, read_index
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.folders import check_steps_free, is_complete, numbered_checkpoints, step_of
from unified_ckpt.plans.checkpoint import Checkpoint, is_stored

logger = logging.getLogger(__name__)


def check(config: Config, resume: str, allow_change: Sequence[str] = ()) -> Path | Location | None:
    """Refuse what cannot work, before any process starts; prepares the corpus on the way.

    Args:
        resume: "", "latest", or a checkpoint's folder or URL.
        allow_change: keys that a resumed run may change although they make it another run.

    Returns:
        The checkpoint that the job goes on from; None for a new run.

    Raises:
        ValueError: one message with what was given, what is expected and what to change.
    """
    KeyChange.check_names(allow_change)
    model = read_model_config(config)
    for line in [*model.unknown_keys(), *left_out(Path(config.model.source), model.model_type)]:
        logger.warning("warning: %s", line)
    check_model(config, model)
    _say_device(config, model)
    folder = as_target("train.output_dir", config.train.output_dir)
    source = find_checkpoint(folder, resume)
    if source is None:
        _check_job(config, model, None, allow_change)
        return None
    try:  # all that is compared with the job is of one checkpoint
        with Checkpoint(source) as checkpoint:
            if resume != "latest":
                _warn_of_later(folder, source)
            _check_job(config, model, source, allow_change)
            if not checkpoint.opened.leads_here():
                raise checkpoint.replaced()
    except CheckpointError as error:
        raise TrainValueError(f"--resume: {error}") from error
    return source


def _check_job(
    config: Config,
    model: DecoderConfig,
    source: Path | Location | None,
    allow_change: Sequence[str],
) -> None:
    """Check what the folders hold, then the corpus, then both against the checkpoint."""
    folder = as_target("train.output_dir", config.train.output_dir)
    check_run_folders(config.local_folders, resuming=source is not None)
    if isinstance(folder, Location):
        _check_store(config, folder, resuming=source is not None)
    if source is not None:
        for part in ("model", "optimizer"):
            read_index(source, part)
    check_space(config, model, folder)
    # One rank of a machine reads the token files through; the others wait for it when they meet.
    prepared = prepare(config, verify=os.environ.get("LOCAL_RANK", "0") == "0")
    check_tokenizer(config, model, prepared.tokenizer)
    for line in open_splits(config, prepared)[0].describe():
        if rank_number() == 0:  # under torchrun every rank checks
            logger.info("%s", line)
    if source is not None:
        _check_steps(config, folder, source)
        _check_changes(config, model, prepared, source, allow_change)


def _warn_of_later(folder: Path | Location, source: Path | Location) -> None:
    """Say which checkpoints of the folder a run that goes on from a named one leaves behind it."""
    step = read_state(source).step
    later = [p.name for p in numbered_checkpoints(folder) if step_of(p) > step and is_complete(p)]
    if later:
        text = "warning: %s holds %s, of later steps than %s: until this run is past them --resume "
        text += "goes on from those, and of its own checkpoints only the last one is kept; move "
        text += "them away, or set another train.output_dir"
        logger.warning(text, folder, ", ".join(reversed(later)), source)


def has_begun(config: Config) -> bool:
    """Whether there are checkpoints in `train.output_dir`, valid or not."""
    found = numbered_checkpoints(as_target("train.output_dir", config.train.output_dir))
    return any(not isinstance(place, Location) or is_stored(place) for place in found)


def check_model(config: Config, model: DecoderConfig) -> None:
    """Check the decoder against the layout.

    Raises:
        ValueError: layers, experts or positions do not fit the layout or the data, balancing does
            not fit the schedule or the family, or `train.trainable` or `param_groups` the names of
            the decoder.
    """
    check_sizes(
        config,
        ModelSizes(
            num_hidden_layers=model.num_hidden_layers,
            num_experts=model.num_experts,
            num_attention_heads=model.num_attention_heads,
            max_position_embeddings=model.max_position_embeddings,
        ),
    )
    check_layout(config, model)
    if config.train.trainable:
        chosen_names("train.trainable", config.train.trainable, model)
    rules_of_job(config, model)


def check_tokenizer(config: Config, model: DecoderConfig, tokenizer: TextTokenizer) -> None:
    """Refuse a tokenizer that the model has too few rows for; say what was decided about it.

    Raises:
        ValueError: with both numbers and the remedy.
    """
    if tokenizer.vocab_size > model.vocab_size:
        remedy = f"lower tokenizer.vocab_size to {model.vocab_size} or use a model config with a "
        remedy += "larger vocabulary"
        if config.model.init_from is not None or config.tokenizer.file is not None:
            remedy = "set tokenizer.pad_vocab_multiple (1 or more), which gives it new rows"
        raise TrainValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's "
            f"vocab_size={model.vocab_size}; {remedy}"
        )
    for line in describe_choice(config, tokenizer):
        logger.info("%s", line)


def train(config: Config, resume: str, context: RankContext) -> None:
    """Train on this rank until the end or a request to stop. Collective over all ranks.

    Args:
        config: the job.
        resume: "", "latest", or a checkpoint's folder or URL.
        context: asked after every step; any rank's request stops all of them with a checkpoint.
    """
    device = choose_device(config.train.device)
    with naming_first_failure() as alive, RankMemory.begin(config, device) as memory:
        _train(config, resume, context, alive, memory)


def _train(
    config: Config, resume: str, context: RankContext, alive: SignsOfLife, memory: RankMemory
) -> None:
    is_first = rank_number() == 0
    with phase(f"joining {config.world_size} ranks", shown=is_first and config.world_size > 1):
        parallel = start(config)
    memory.rank = parallel.rank
    alive.begin(limit_s=config.parallel.timeout_s)
    with _busy("building the model and opening the corpus", is_first, memory):
        training = build_training(config, parallel)
    memory.label("parameters", training.runner.stages.parameters())
    checkpointer = training.checkpointer
    reporter: Reporter | None = None
    try:
        state = _loaded(config, resume, checkpointer, memory)
        if state is not None:
            context.step = state.step
        if parallel.rank == 0:
            logger.info("step %d begins; the first one takes longer", context.step + 1)
            reporter = _reporter(config, context.step)
        if checkpointer.nodes is not None:
            for line in checkpointer.nodes.goal():
                if parallel.rank == 0:
                    logger.info("%s", line)
        loop = TrainingLoop.begin(config, training, reporter, state, memory=memory)
        loop.saver.open()
        del training  # the loop alone holds it, and lets it go when the layout changes
        saved = loop.run(context)
    finally:
        checkpointer.close()
        if reporter is not None:
            reporter.close()
    dist.barrier()
    dist.destroy_process_group()
    if parallel.rank == 0:  # while no rank waits: plots of a long run take minutes
        _finish(config, saved)
    loop.saver.check()


def _loaded(
    config: Config, resume: str, checkpointer: Checkpointer, memory: RankMemory
) -> TrainerState | None:
    """The state of the checkpoint that is resumed, whose weights are loaded, or those of a model
    that the job begins with. Collective over all ranks.
    """
    is_first = rank_number() == 0
    if resume:
        with _busy(f"loading the checkpoint {resume}", is_first, memory):
            if resume == "latest":
                return checkpointer.resume()
            return checkpointer.load(as_target("--resume", resume))
    if config.model.init_from is not None:
        with _busy(f"loading the weights of {config.model.init_from}", is_first, memory):
            source = Path(config.model.init_from)
            checkpointer.load_weights(readable_weights(source, config.data.cache_dir))
    return None


@contextmanager
def _busy(text: str, is_first: bool, memory: RankMemory) -> Iterator[None]:
    """What is said on the first rank, and named where it ends in an out-of-memory."""
    with phase(text, shown=is_first), memory.phase(text):
        yield


def _reporter(config: Config, step: int) -> Reporter:
    metrics = MetricsLog(config.log_folder, tensorboard=config.log.tensorboard, resume_step=step)
    return Reporter(metrics, ProgressLine(config.train.max_steps, config.log.progress))


def _finish(config: Config, saved: Path | Location | None) -> None:
    folder = config.log_folder
    written: list[Path | Location] = [folder / "metrics.jsonl"]
    if config.log.plots:
        try:
            written += write_plots(folder / "metrics.jsonl", folder)
        except OSError as error:
            logger.warning("warning: the plots are not written: %s", error)
    if (folder / TIMELINE_FILE).exists():
        written.append(folder / TIMELINE_FILE)
    if saved is not None:
        written.append(saved)
    print("results:", *(f"  {path}" for path in written), sep="\n", flush=True)


def _say_device(config: Config, model: DecoderConfig) -> None:
    """Refuse a device that is not there; warn of cards that are not used."""
    device = choose_device(config.train.device, config.world_size)
    if config.memory.allocator == "gpu-alloc" and device.type == "cpu":
        raise TrainValueError(
            'memory.allocator="gpu-alloc" serves CUDA devices, and the job runs on the CPU; leave '
            "it out"
        )
    if config.model.experts_fp8 and device.type == "cpu":
        raise TrainValueError(
            "model.experts_fp8=true needs CUDA devices of compute capability 9.0 or more, and the "
            "job runs on the CPU; leave it out"
        )
    if rank_number() == 0:
        for line in idle_keys(config, model, device):
            logger.warning("warning: %s", line)
    falls_back = device.type == "cpu" and config.train.device == "auto"
    if falls_back and torch.cuda.is_available() and rank_number() == 0:
        logger.warning(
            "warning: train.device='auto' trains on the CPU: this machine has fewer CUDA devices "
            "(%d) than ranks; start fewer ranks to use them",
            torch.cuda.device_count(),
        )


def _check_store(config: Config, folder: Location, *, resuming: bool) -> None:
    """Say what lies where, and refuse the checkpoints of another run."""
    if rank_number() == 0:
        logger.info(
            "checkpoints go to %s; metrics, plots, run.json and the run's lock to log.dir=%s",
            folder,
            config.log_folder,
        )
    if not resuming and has_begun(config):
        raise TrainValueError(HOLDS_CHECKPOINTS.format(folder))


def _check_steps(config: Config, folder: Path | Location, source: Path | Location) -> None:
    state = read_state(source)
    if state.step >= config.train.max_steps:
        raise TrainValueError(
            f"{source} is at step {state.step} and train.max_steps={config.train.max_steps}; "
            "raise train.max_steps to train further"
        )
    check_steps_free(folder, range(state.step + 1, config.train.max_steps + 1))


def _check_changes(
    config: Config,
    model: DecoderConfig,
    prepared: PreparedCorpus,
    source: Path | Location,
    allow_change: Sequence[str],
) -> None:
    """Show the difference to the checkpoint's own job, then refuse what must not differ."""
    lines, changes = describe_resume(config, model, prepared, source)
    idle = sorted(set(allow_change) - {change.name for change in changes})
    lines += [f"  --allow-change {name}: it did not change" for name in idle]
    if rank_number() == 0:
        print(*lines, sep="\n", flush=True)
    refuse_changes(changes, allow_change, source)
