"""How good a checkpoint is on a set: what is checked before ranks start, and what each rank runs.

figures = evaluate(EvaluateJob(checkpoint="checkpoint-250", data=("held_out.jsonl",)))
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from moe_train.cache import write_atomic
from moe_train.config import SourceConfig, load_config
from moe_train.data import TokenFiles, prepare
from moe_train.errors import StoppedUnsavedError, TrainValueError, check_type
from moe_train.evaluation import (
    ChoiceRow,
    EvaluationStoppedError,
    Question,
    measure_choices,
    measure_perplexity,
    parse_question,
    question_rows,
)
from moe_train.generation import ModelOptions, ModelRanks, check_model
from moe_train.inference.json_lines import read_records
from moe_train.inference.running import job_from_json, model_of_rank, run_inference
from moe_train.inference.stored_model import stored_model
from moe_train.model import DecoderConfig
from moe_train.rank import RankContext
from moe_train.tokenization import TextTokenizer, load_tokenizer

MULTIPLE_CHOICE = "multiple_choice"
_DEFAULT_LENGTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateJob:
    """What `moe-train eval` runs.

    Attributes:
        checkpoint: folder or URL of a transformers checkpoint.
        data: a job's TOML file, whose held-out documents are read; or files, folders and globs.
        kind: of the files: text, chat, tokens, or multiple_choice (JSON lines).
        content_field: where a row has its content; None: that of the kind.
        sequence_length: tokens of a sequence; None: the job's, or what the model takes, at most
            2048.
        batch_size: rows of a rank at a time.
    """

    checkpoint: str
    data: Sequence[str]
    kind: str = "text"
    content_field: str | None = None
    sequence_length: int | None = None
    batch_size: int = 8
    model: ModelOptions = field(default_factory=ModelOptions)
    token_files: Sequence[str] = ()
    num_bytes: int | None = None
    result_file: str = ""

    def __post_init__(self) -> None:
        check_type("checkpoint", self.checkpoint, str)
        check_type("data", self.data, tuple, list)


def evaluate(job: EvaluateJob) -> dict[str, float] | None:
    """Measure on the ranks of the job's layout.

    Returns:
        The figures of `measure_perplexity` or `measure_choices`; None on ranks that another program
        has started, other than the one that has them.

    Raises:
        FileNotFoundError, ValueError: what cannot be used, by file and line.
        RankFailedError: a rank failed or was killed.
    """
    check_type("job", job, EvaluateJob)
    with stored_model(job.checkpoint) as (checkpoint, _):
        config = check_model(checkpoint, job.model.parallel)
        tokenizer = load_tokenizer(checkpoint)
    if job.batch_size < 1 or not job.data:
        raise TrainValueError(f"batch_size={job.batch_size}, data={job.data}; expected at least 1")
    with tempfile.TemporaryDirectory(prefix="moe-train-eval-") as folder:
        result = Path(folder) / "figures.json"
        if job.kind == MULTIPLE_CHOICE:
            _questions(job, tokenizer, config)
        else:
            job = _with_tokens(job, config, tokenizer, Path(folder))
        job = replace(job, result_file=str(result))
        stopped_by = run_inference(run_evaluation, asdict(job), job.model)
        if stopped_by is not None:
            text = f"stopped by {stopped_by.name} before all was read; there are no figures"
            raise StoppedUnsavedError(text, signal_number=int(stopped_by))
        return json.loads(result.read_bytes()) if result.exists() else None


def run_evaluation(text: str, context: RankContext) -> None:
    """Measure on this rank. Collective over all ranks.

    Args:
        text: the job as JSON.
        context: asked now and then whether to stop, which leaves no figures.
    """
    job = job_from_json(EvaluateJob, text)
    with ExitStack() as stack:
        checkpoint, place = stack.enter_context(stored_model(job.checkpoint))
        tokenizer = load_tokenizer(checkpoint)
        model = stack.enter_context(model_of_rank(checkpoint, job.model, place))
        try:
            figures = _measure(job, model, tokenizer, lambda: context.stop_requested)
        except EvaluationStoppedError:
            return  # the caller knows of the signal
        if model.is_writer:
            write_atomic(Path(job.result_file), json.dumps(figures))


def _measure(
    job: EvaluateJob,
    model: ModelRanks,
    tokenizer: TextTokenizer,
    should_stop: Callable[[], bool],
) -> dict[str, float]:
    size = job.batch_size
    if job.kind == MULTIPLE_CHOICE:
        questions, rows = _questions(job, tokenizer, model.config)
        return measure_choices(model, questions, rows, batch_size=size, should_stop=should_stop)
    files = TokenFiles(tuple(map(Path, job.token_files)))
    return measure_perplexity(
        model,
        files.open(int(job.sequence_length or _DEFAULT_LENGTH), tokenizer.pad_token_id),
        batch_size=size,
        num_bytes=job.num_bytes,
        should_stop=should_stop,
    )


def table_of(figures: dict[str, float]) -> str:
    """Names and figures in two columns."""
    shown = {n: f"{v:,}" if isinstance(v, int) else f"{v:.6g}" for n, v in figures.items()}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value:>14}" for name, value in shown.items())


def _with_tokens(
    job: EvaluateJob, config: DecoderConfig, tokenizer: TextTokenizer, folder: Path
) -> EvaluateJob:
    """The job with its token files, made where they are not in the cache."""
    length = min(_DEFAULT_LENGTH, config.max_position_embeddings)
    if len(job.data) == 1 and job.data[0].endswith(".toml"):
        training = load_config(Path(job.data[0]), [])
        prepared = prepare(training)
        if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
            raise TrainValueError(
                f"{job.data[0]} prepares its text with another tokenizer than {job.checkpoint} "
                "has; name the text itself instead of the job, or set tokenizer.file in it"
            )
        files, length = TokenFiles.of_corpus(prepared), training.data.sequence_length
    else:
        files = TokenFiles.of_source(_source(job), tokenizer, folder)
    length = length if job.sequence_length is None else job.sequence_length
    if not 1 <= length <= config.max_position_embeddings:
        raise TrainValueError(
            f"sequence_length={length}; the model takes from 1 to {config.max_position_embeddings}"
        )
    return replace(
        job,
        sequence_length=length,
        token_files=tuple(map(str, files.paths)),
        num_bytes=files.num_bytes(tokenizer),
    )


def _source(job: EvaluateJob) -> SourceConfig:
    """The files as a source, of whatever ending."""
    fields = {"chat": "messages", "tokens": "input_ids"}
    return SourceConfig(
        name="data",
        corpus=tuple(job.data),
        kind=job.kind,  # type: ignore[arg-type]
        format="auto",
        field=job.content_field or fields.get(job.kind, "text"),
        extensions=("*",),
        packing="best_fit",
    )


def _questions(
    job: EvaluateJob, tokenizer: TextTokenizer, config: DecoderConfig
) -> tuple[list[Question], list[list[ChoiceRow]]]:
    """The questions of all files, and their rows."""
    questions, rows = [], []
    for path in job.data:
        for number, record in read_records(Path(path)):
            source = f"{path}, line {number}"
            question = parse_question(record, source)
            questions.append(question)
            rows.append(question_rows(question, tokenizer, source, config.max_position_embeddings))
    return questions, rows
