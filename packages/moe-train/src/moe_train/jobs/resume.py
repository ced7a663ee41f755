"""What a resumed run may change: the difference to the checkpoint's own job, shown and checked.

Invariant: every difference is one line before anything runs. What a key may do stands in its
declaration (`on_resume`); of the model, `model_changes` finds it out; text and tokenizer are
compared by what they hold, not by where they lie.

    lines, changes = describe_resume(config, model, prepared, source)
    print(*lines, sep="\\n")
    refuse_changes(changes, allowed, source)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_train.checkpoint import (
    TrainerState,
    checkpoint_files,
    has_part,
    own_job,
    read_state,
    small_files,
)
from moe_train.config import OWN_TOML, Config, KeyChange
from moe_train.data import PreparedCorpus
from moe_train.errors import TrainValueError
from moe_train.jobs.model_changes import model_changes
from moe_train.layout import chosen_names, read_decoder
from moe_train.model import DecoderConfig
from moe_train.optim import LrSchedule
from moe_train.tokenization import TextTokenizer, load_tokenizer
from moe_train.training import rules_of_job
from unified_ckpt.files.storage import Location


def describe_resume(
    config: Config, model: DecoderConfig, prepared: PreparedCorpus, source: Path | Location
) -> tuple[list[str], list[KeyChange]]:
    """Lines for people about a run that goes on from `source`, and what differs from its job.

    Raises:
        ValueError: the checkpoint cannot be read, or the learning rate cannot go on as asked.
    """
    state, own = read_state(source), own_job(source)
    of_keys = [] if own is None else KeyChange.between(own, config)
    changes = [change for change in of_keys if change.on_resume != "compared"]
    changes += _state_changes(config, state, {change.name for change in changes})
    tokenizer = prepared.tokenizer  # read once: a large vocabulary takes seconds
    files = checkpoint_files(config, model, tokenizer)
    written = DecoderConfig.from_dict(json.loads(files["config.json"]))  # end tokens settled
    compared = [change for change in of_keys if change.on_resume == "compared"]
    with small_files(source) as folder:
        changes += model_changes(read_decoder(folder, source), written)
        changes += _content_changes(state, prepared, tokenizer, folder, compared)
    lines = [f"resuming {source}: step {state.step}, {state.consumed_samples} samples used"]
    if own is None:
        lines.append(f"{source / OWN_TOML} cannot be read as a job, so its keys are not compared")
    lines += [str(change) for change in changes]
    lines += _rate_notes(config, state)
    if own is not None:
        lines += _dtype_notes(own, config, source)
        lines += _moment_notes(own, config, model)
    return [lines[0], *(f"  {line}" for line in lines[1:])], changes


def refuse_changes(
    changes: Sequence[KeyChange], allowed: Sequence[str], source: Path | Location
) -> None:
    """Refuse what must not change, or only with `--allow-change`.

    Raises:
        ValueError: names every such key with both values, and the remedy.
    """
    never = [change for change in changes if change.on_resume == "never"]
    if never:
        raise TrainValueError(
            f"--resume {source}: {'; '.join(map(str, never))}: the weights of the checkpoint would "
            "mean nothing; restore what it was trained with, or start a new run"
        )
    asked = [c for c in changes if c.on_resume == "asked" and c.name not in allowed]
    if asked:
        flags = " ".join(f"--allow-change {name}" for name in dict.fromkeys(c.name for c in asked))
        hint = ""
        if any(change.name.startswith("tokenizer.") for change in asked):
            own = source if isinstance(source, Path) else f"FOLDER with a copy of {source}"
            hint = (
                f"; to keep the checkpoint's own tokenizer, set tokenizer.file={own}, leave out "
                "tokenizer.chat_template, and leave the other keys of [tokenizer] as they were"
            )
        raise TrainValueError(
            f"--resume {source}: {'; '.join(map(str, asked))}: another run than the checkpoint's; "
            f"restore it, or say that it is meant: {flags}{hint}"
        )


def _state_changes(config: Config, state: TrainerState, seen: set[str]) -> list[KeyChange]:
    """What the state itself says of the job, for checkpoints whose job cannot be read."""
    pairs = {
        "data.sequence_length": (state.sequence_length, config.data.sequence_length),
        "train.seed": (state.seed, config.train.seed),
    }
    return [
        KeyChange(name=name, old=old, new=new, on_resume="asked")
        for name, (old, new) in pairs.items()
        if old != new and name not in seen
    ]


def _content_changes(
    state: TrainerState,
    prepared: PreparedCorpus,
    tokenizer: TextTokenizer,
    folder: Path,
    compared: Sequence[KeyChange],
) -> list[KeyChange]:
    """`compared` as free changes, or as asked ones where tokenizer or text are others now."""
    if state.version == 1:  # its other files were not those of the tokenizer
        file = "tokenizer.json"
        was = _vocabulary((folder / file).read_bytes())
        now = _vocabulary(tokenizer.files[file])
    else:
        was, now = load_tokenizer(folder).fingerprint, tokenizer.fingerprint
    is_other = {"tokenizer": was != now}
    fingerprint = state.data_fingerprint
    is_other["data"] = is_other["sources"] = fingerprint != prepared.fingerprint
    found = []
    for change in compared:
        asked = is_other.get(change.name.partition(".")[0], False)
        found.append(replace(change, on_resume="asked" if asked else "free"))
    asked_tables = {c.name.partition(".")[0] for c in found if c.on_resume == "asked"}
    if is_other["tokenizer"] and "tokenizer" not in asked_tables:
        found.append(_by_content("tokenizer.file", "tokenizer", was, now))
    elif is_other["data"] and not asked_tables:  # another tokenizer makes other token files
        found.append(_by_content("data.corpus", "text", fingerprint, prepared.fingerprint))
    return found


def _by_content(name: str, noun: str, old: str, new: str) -> KeyChange:
    pair = {"old": f"{noun} {old[:12]}", "new": f"{noun} {new[:12]}"}
    return KeyChange(name=name, on_resume="asked", **pair)


def _rate_notes(config: Config, state: TrainerState) -> list[str]:
    job = LrSchedule.of(config.optimizer, config.train.max_steps)
    before = state.schedule or job
    now = before.resumed(state.step, config.optimizer, config.train.max_steps)
    step, last = state.step + 1, config.train.max_steps
    lines = [] if state.schedule else ["learning rate: of the job, the checkpoint has none"]
    if before.rate(step) != now.rate(step):
        lines.append(
            f"learning rate of step {step}: {now.rate(step):.6g} instead of {before.rate(step):.6g}"
        )
    if last == before.max_steps:
        return lines
    curve = f"{now.decay} to {now.end:.6g} at step {now.decay_steps}"
    if now.decay_steps < last:
        curve += f", then held until step {last}"
    elif now.decay_steps > last:
        curve += f", ended by max_steps={last} at {now.rate(last):.6g}"
    others = sorted({"constant", "rewarm", "restretch"} - {config.optimizer.on_extend})
    how = f"optimizer.on_extend={config.optimizer.on_extend}, or {' or '.join(others)}"
    return [*lines, f"learning rate: {curve} ({how})"]


def _dtype_notes(own: Config, config: Config, source: Path | Location) -> list[str]:
    had, has = own.train, config.train
    has_masters = has_part(source, "master_weights")
    lines = []
    if has.master_weights and not has_masters:
        lines.append(f"master weights: begin as the {had.dtype} weights of the checkpoint")
    if has_masters and has.dtype == "float32":
        lines.append("weights: the master weights of the checkpoint")
    elif has_masters and not has.master_weights:
        lines.append("master weights: those of the checkpoint are dropped, rounded weights go on")
    elif had.dtype == "bfloat16" and has.dtype == "float32":
        lines.append("weights: the bfloat16 weights of the checkpoint, which has no master weights")
    if had.state_dtype != has.state_dtype:
        lines.append(f"optimizer moments: converted from {had.state_dtype} to {has.state_dtype}")
    return lines


def _moment_notes(own: Config, config: Config, model: DecoderConfig) -> list[str]:
    """Which parameters have no moments in the checkpoint, and why."""
    patterns = own.train.trainable, config.train.trainable
    had, has = (chosen_names("train.trainable", each, model) for each in patterns)
    before, now = rules_of_job(own, model), rules_of_job(config, model)
    others = {n for n in had & has if before[n].algorithm != now[n].algorithm}
    reasons = {"was frozen before": has - had, "another algorithm updated before": others}
    return [
        f"optimizer moments: start at zero for what {reason}: {', '.join(sorted(names)[:3])} "
        f"({len(names)} in all)"
        for reason, names in reasons.items()
        if names
    ]


def _vocabulary(text: bytes) -> str:
    return hashlib.blake2b(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()
