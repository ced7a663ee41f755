"""Put the libraries together for one rank.

mesh-spmd lays out the parameters, comm-collectives tells every rank about the corpus and reduces
gradients, moe-pipeline drives the stage, unified-ckpt and weight-convert (through `layout`) read
and write it. gpu-alloc replays what this allocates, in `plan`.

Length: each key of a job has its one line here, where it becomes an option of a library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_pipeline import PipelineExecutor, Schedule
from moe_pipeline.executor import ExecutorOptions
from moe_pipeline.schedules import Action
from moe_train.checkpoint import BackgroundSaves, Checkpointer, NodeStates, checkpoint_files
from moe_train.config import Config
from moe_train.data import PreparedCorpus, prepare
from moe_train.errors import TrainValueError
from moe_train.layout import (
    ParameterLayout,
    chosen_names,
    decoder_shapes,
    parameter_layouts,
    read_decoder,
    stage_tensors,
    stored_tensors,
)
from moe_train.model import (
    DecoderConfig,
    DecoderStage,
    StageOptions,
    initialise,
)
from moe_train.optim import (
    GradientStore,
    Optimizer,
    ParameterGroup,
    ParameterShares,
    StageBlocks,
    UpdateRule,
    update_rules,
)
from moe_train.parallel import Parallel
from moe_train.tokenization import vocabulary_rows
from moe_train.training.experts import (
    ExpertLoads,
    aux_loss_coef,
    check_balancing,
    check_products,
    dispatch_options,
    expert_parts,
)
from moe_train.training.pipelines import (
    RankStages,
    forwards_of,
    layers_of_stages,
    training_schedule,
    unmeasured_schedule,
)
from moe_train.training.sources import Corpus, known_corpus, open_corpus
from moe_train.training.step import StepRunner
from moe_train.training.updates import (
    groups_of_job,
    layouts_shared_out,
    stage_blocks,
    state_options,
)
from unified_ckpt import ManagerOptions
from unified_ckpt.files.storage import as_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything one rank needs to train."""

    parallel: Parallel
    runner: StepRunner
    checkpointer: Checkpointer
    corpus: Corpus
    prepared: PreparedCorpus | None
    """Where the corpus lies, on ranks that read tokens."""


def read_model_config(config: Config) -> DecoderConfig:
    """The decoder's shape, from `model.init_from` or `model.config_file`.

    Of a model of text and images it is the decoder of text.
    Layers for multi-token prediction that are not trained are left out of a model that starts
    from random weights, and are kept as they are with a model that starts from a checkpoint.
    """
    model = read_decoder(Path(config.model.source), of_text=True)
    model = model.with_vocab_size(vocabulary_rows(config, model.vocab_size))
    is_idle = bool(model.mtp_layers) and config.train.mtp_loss_coef == 0
    leaves_out = is_idle and config.model.init_from is None
    return model.with_mtp_layers(0) if leaves_out else model


def check_layout(config: Config, model: DecoderConfig) -> None:
    """Check the decoder and the batch against the layout, and against every later one; pure.

    Raises:
        ValueError: layers, experts or sequences do not divide, parts are of a layer without
            experts, balancing does not fit the schedule or the family, or the ways of tokens do not
            fit the layout or the decoder.
    """
    _check_one_layout(config, model)
    asked, step = config.parallel, config.parallel.next_change(0)
    while step is not None:
        parallel = asked.at_step(step)
        if asked.is_by_load(step):
            parallel = ExpertLoads().balanced(parallel, model)
        try:
            _check_one_layout(replace(config, parallel=parallel), model)
        except TrainValueError as error:
            raise TrainValueError(f"parallel.relayout after step {step}: {error}") from error
        step = asked.next_change(step)


def _check_one_layout(config: Config, model: DecoderConfig) -> None:
    config.parallel.check_divides(
        num_hidden_layers=model.num_hidden_layers,
        num_experts=model.num_experts,
        num_heads=model.num_attention_heads,
    )
    expert_parts(config, model)
    config.check_batch()
    config.parallel.check_dropout(model.attention.dropout)
    config.parallel.check_tensor(
        widths=model.dense_widths,
        vocab_size=model.vocab_size,
        norms_all_heads=model.norms_all_heads,
    )
    width, has_bias = model.moe.moe_intermediate_size, model.moe.experts.has_bias
    config.parallel.check_expert_width(width, has_bias=has_bias)
    check_balancing(config, model, unmeasured_schedule(config))
    dispatch_options(config, model)
    check_products(config, model)
    StageOptions.check_kept(config.train.recompute_keep)


def rules_of_job(config: Config, model: DecoderConfig) -> dict[str, UpdateRule]:
    """How each parameter of the decoder is updated if it is trained; pure.

    Raises:
        ValueError: patterns of a `[param_groups.NAME]` match nothing, or what another group has.
    """
    names = {
        group.name: chosen_names(f"{group.place}.parameters", group.parameters, model)
        for group in config.param_groups
    }
    return update_rules(decoder_shapes(model), config, names)


def build_stages(config: Config, model: DecoderConfig, parallel: Parallel) -> RankStages:
    """This rank's part of the decoder; what `train.trainable` leaves out is frozen."""
    layers = layers_of_stages(config, model)
    common = _stage_options(config, model, parallel)
    stages = RankStages(
        model,
        {
            number: DecoderStage(
                model,
                replace(
                    common,
                    layers=layers[number],
                    first=number == 0,
                    last=number == len(layers) - 1,
                ),
            )
            for number in parallel.stages
        },
    )
    if config.train.trainable:
        names = chosen_names("train.trainable", config.train.trainable, model)
        for name, parameter in stages.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in names)
    return stages


def _stage_options(config: Config, model: DecoderConfig, parallel: Parallel) -> StageOptions:
    """What all stages of this rank have in common."""
    return StageOptions(
        layers=range(0),
        first=False,
        last=False,
        sample_rank=parallel.sample_rank,
        num_sample_ranks=parallel.num_sample_ranks,
        cut=parallel.cut,
        sequence_group=parallel.sequence_group,
        cp_group=parallel.cp_group,
        tp=parallel.tp,
        cp_attention=config.parallel.cp_attention,
        ep_group=parallel.ep_group if config.parallel.ep > 1 else None,
        etp_group=parallel.etp_group,
        expert_parts=expert_parts(config, model),
        token_group=parallel.data_group if parallel.num_data_ranks > 1 else None,
        num_microbatches=config.train.gradient_accumulation_steps,
        aux_loss_coef=aux_loss_coef(config, model),
        aux_loss_scope=config.moe.aux_loss_scope,
        z_loss_coef=config.moe.z_loss_coef,
        capacity_factor=config.moe.capacity_factor,
        drop_policy=config.moe.token_drop_policy,
        bias_update_rate=config.moe.expert_bias_update_rate,
        mtp_loss_coef=config.train.mtp_loss_coef,
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        dispatch=dispatch_options(config, model, parallel.ep_group),
        experts_implementation=config.model.experts_implementation,
        experts_fp8=config.model.experts_fp8,
        recompute=config.train.recompute,
        recompute_keep=config.train.recompute_keep,
        offload_activations=config.train.offload_activations,
        seed=config.train.seed,
        device=parallel.device,
        dtype=getattr(torch, config.train.dtype),
    )


def build_training(
    config: Config, parallel: Parallel, *, former: Training | None = None
) -> Training:
    """Build this rank's training. Collective over all ranks.

    Args:
        former: of the job in another layout. The new one has its decoder and its corpus, whatever
            has become of the files from which it read them.

    Raises:
        ValueError: this rank's corpus is not that of rank 0.
    """
    model = read_model_config(config) if former is None else former.runner.stages.config
    known = None if former is None else known_corpus(former.prepared)
    needs_tokens = parallel.is_first or parallel.is_last
    prepared = (known or prepare(config)) if needs_tokens else None
    corpus = open_corpus(config, parallel, prepared)
    files: dict[str, bytes] = {}
    if parallel.rank == 0 and prepared is not None:
        files = checkpoint_files(config, model, prepared.tokenizer)
    runner, checkpointer = build_runner(config, model, parallel, files)
    return Training(
        parallel=parallel,
        runner=runner,
        checkpointer=checkpointer,
        corpus=corpus,
        prepared=prepared,
    )


def build_runner(
    config: Config,
    model: DecoderConfig,
    parallel: Parallel,
    files: Mapping[str, bytes],
    schedule: Schedule | None = None,
) -> tuple[StepRunner, Checkpointer]:
    """The stage with its optimizer, executors and checkpoints; no data. `files` is what rank 0
    writes beside the weights; a `schedule` of None is that of the configuration.
    """
    stages = build_stages(config, model, parallel)
    parts = expert_parts(config, model)
    tp, etp = config.parallel.tp, config.parallel.etp
    layouts = parameter_layouts(stages, model, parallel.stage_mesh, parts, tp, etp)
    rules = rules_of_job(config, model)
    finer = layouts_shared_out(layouts, rules) if config.parallel.sharding else {}
    of_updates = layouts | finer
    parameters = {name: p for name, p in stages.named_parameters() if p.requires_grad}
    tensors = stage_tensors(stages)
    _initialise(config, model, parallel, layouts, tensors)
    groups = groups_of_job(config, model, parameters, parallel, layouts, finer)
    blocks = stage_blocks(stages)
    rows = _parameter_rows(config, blocks, groups)
    optimizer = Optimizer(
        parameters,
        rules,
        config.optimizer,
        state_options(config, parameters, of_updates, parallel),
        shares=[g.shares for g in groups if g.shares and not rows.holds(g.shares)],
        rows=rows.own,
    )
    schedule = schedule or training_schedule(config, stages, parallel)
    check_balancing(config, model, schedule)
    background = _background(config, stages)
    runner = StepRunner(
        parallel=parallel,
        stages=stages,
        executor=_executor(config, stages, schedule, parallel),
        evaluator=_executor(config, stages, forwards_of(schedule), parallel),
        gradients=_gradients(config, groups, schedule.ranks[parallel.stage], blocks, rows),
        optimizer=optimizer,
        max_grad_norm=config.optimizer.max_grad_norm,
        updates_expert_bias=config.moe.update_expert_bias,
        before_update=None if background is None else background.finish_copy,
    )
    rows.let_go()
    return runner, Checkpointer(
        folder=as_target("train.output_dir", config.train.output_dir),
        rank=parallel.rank,
        parameters=tensors | rows.named(parameters),
        layouts=layouts | {name: finer[name] for name in rows.named(parameters)},
        layouts_of_updates=of_updates,
        optimizer=optimizer,
        files=files,
        options=_manager_options(config),
        nodes=NodeStates.of(config),
        background=background,
        moments=config.checkpoint.moments,
    )


def _parameter_rows(
    config: Config, blocks: Mapping[int, StageBlocks], groups: list[ParameterGroup]
) -> ParameterShares:
    """Parameters that are shared out; none of them below level 3."""
    by_rows = [group.shares for group in groups if group.shares and group.is_by_rows]
    chosen = by_rows if config.parallel.sharding > 2 else []
    return ParameterShares(chosen, blocks)


def _background(config: Config, stages: RankStages) -> BackgroundSaves | None:
    """What saves beside training, a piece before each forward."""
    background = BackgroundSaves.of(config)
    if background is not None:
        for stage in stages.by_number.values():
            stage.register_forward_pre_hook(lambda *_: background.copy_piece())
    return background


def _initialise(
    config: Config,
    model: DecoderConfig,
    parallel: Parallel,
    layouts: Mapping[str, ParameterLayout],
    tensors: Mapping[str, Tensor],
) -> None:
    """Random weights that depend on a tensor's name and place alone; none of a rank alone."""
    if parallel.is_alone:
        return
    stored = stored_tensors(layouts, tensors, parallel.rank)
    for shard in stored.shards:
        initialise(
            shard.key,
            shard.tensor,
            seed=config.train.seed,
            std=model.initializer_range,
            whole=shard.box.global_shape,
            offset=shard.box.offset,
        )
    stored.write_back()


def _gradients(
    config: Config,
    groups: list[ParameterGroup],
    row: Sequence[Action],
    blocks: Mapping[int, StageBlocks],
    rows: ParameterShares,
) -> GradientStore:
    train = config.train
    asked = train.grad_reduce_dtype
    return GradientStore(
        groups,
        fp32_accumulation=train.master_weights and train.dtype != "float32",
        reduce_dtype=None if asked is None else getattr(torch, asked),
        overlap=row if config.parallel.overlap_grad_reduce else None,
        stages=blocks,
        parameters=rows,
    )


def _manager_options(config: Config) -> ManagerOptions:
    asked = config.checkpoint
    return ManagerOptions(
        save_steps=asked.interval_steps,
        save_total_limit=asked.save_total_limit,
        best_metric="validation_loss" if asked.keep_best else None,
        signals=(),
        timeout_s=max(config.parallel.timeout_s, 600.0),
    )


def _executor(
    config: Config, stages: RankStages, schedule: Schedule, parallel: Parallel
) -> PipelineExecutor:
    return PipelineExecutor(
        stages.by_number,
        schedule,
        rank=parallel.stage,
        forward_group=parallel.forward_group,
        backward_group=parallel.backward_group,
        options=ExecutorOptions(
            device=parallel.device,
            timeout_s=config.parallel.timeout_s,
            gradient_accumulation_fusion=config.train.gradient_accumulation_fusion,
            alone=partial(_passed, config, stages, parallel) if parallel.is_alone else None,
        ),
    )


def _passed(config: Config, stages: RankStages, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """What a stage gives the next one for a microbatch of whole sequences; nothing is computed."""
    rows = config.train.global_batch_size // (
        config.train.gradient_accumulation_steps * parallel.num_sample_ranks
    )
    shape = (rows, config.data.sequence_length)
    hidden = torch.empty(
        (rows, parallel.num_positions(shape[1]), stages.config.hidden_size),
        dtype=getattr(torch, config.train.dtype),
        device=parallel.device,
        requires_grad=True,
    )
    positions = torch.arange(shape[1], device=parallel.device)
    return hidden, positions.expand(shape).contiguous()
