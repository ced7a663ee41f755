import errno
import gzip
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from moe_train.config.data_tables import DataConfig, SourceConfig, TokenizerConfig
from moe_train.config.model_tables import ModelConfig
from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.config.tables import Config
from moe_train.config.train_tables import TrainConfig
from moe_train.data.joined import open_joined
from moe_train.data.packing import IGNORED_LABEL
from moe_train.data.prepare import PreparedCorpus, prepare
from moe_train.data.token_store import open_store
from moe_train.evaluation import unigram_cross_entropy
from ranktest import run_ranks


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    words = ["def", "return", "import", "self", "value", "None", "é"]
    for index in range(40):
        rng = random.Random(index)
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(rng.randint(5, 40))]
        path = folder / f"m{index % 4}" / f"f{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")
    return folder


Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path, text: Path) -> Make:
    def config(*, tokenizer: dict[str, object] | None = None, **data: object) -> Config:
        values = {"corpus": (str(text),), "cache_dir": str(tmp_path / "cache"), **data}
        return Config(
            model=ModelConfig(config_file="config.json"),
            data=DataConfig(**values),  # type: ignore[arg-type]
            tokenizer=TokenizerConfig(**(tokenizer or {"vocab_size": 300})),  # type: ignore[arg-type]
            train=TrainConfig(output_dir="out", max_steps=1, global_batch_size=1),
            optimizer=OptimizerConfig(lr=1e-3),
        )

    return config


def texts_of(prepared: PreparedCorpus, path: Path) -> list[str]:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_file))
    tokens = open_store(path).tokens.astype(np.int64)
    ends = np.flatnonzero(tokens == prepared.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    parts = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_every_document_is_in_one_split_whole_and_unchanged(make: Make, text: Path) -> None:
    prepared = prepare(make(validation_fraction=0.2))
    train = texts_of(prepared, prepared.sources[0].train)
    held = texts_of(prepared, prepared.sources[0].validation)
    documents = [path.read_text(encoding="utf-8") for path in text.rglob("*.py")]
    assert sorted(train + held) == sorted(documents)
    share = sum(map(len, held)) / sum(map(len, documents))
    assert 0.14 < share <= 0.21, share


def test_second_call_finds_the_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(make())
    stamp = first.sources[0].train.stat().st_mtime_ns
    # Nothing is read again.
    monkeypatch.setattr(import_module("moe_train.data.prepare"), "plan_source", None)
    assert prepare(make()) == first
    assert first.sources[0].train.stat().st_mtime_ns == stamp


def test_touched_files_are_read_again_but_not_encoded(
    make: Make, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(make())
    for path in text.rglob("*.py"):
        os.utime(path, ns=(1, 1))
    monkeypatch.setattr(import_module("moe_train.data.prepare"), "make_pieces", None)
    assert prepare(make()) == first


def test_same_files_elsewhere_have_the_same_fingerprint(
    make: Make, text: Path, tmp_path: Path
) -> None:
    first = prepare(make())
    shutil.copytree(text, tmp_path / "moved" / "text")
    config = make(
        corpus=(str(tmp_path / "moved" / "text"),), cache_dir=str(tmp_path / "other cache")
    )
    second = prepare(config)
    assert second.fingerprint == first.fingerprint
    assert second.sources[0].train.read_bytes() == first.sources[0].train.read_bytes()
    assert second.tokenizer_file.read_bytes() == first.tokenizer_file.read_bytes()


def test_what_shapes_the_tokens_changes_the_fingerprint(make: Make, text: Path) -> None:
    prints = [
        prepare(make()).fingerprint,
        prepare(make(validation_fraction=0.3)).fingerprint,
        prepare(make(max_bytes=8000)).fingerprint,
        prepare(make(tokenizer={"vocab_size": 280})).fingerprint,
        prepare(make(tokenizer={"vocab_size": 300, "train_bytes": 2000})).fingerprint,
    ]
    path = next(text.rglob("*.py"))
    path.write_text(path.read_text(encoding="utf-8").replace("def", "fed"), encoding="utf-8")
    prints.append(prepare(make()).fingerprint)
    assert len(set(prints)) == len(prints)
    assert prepare(make(sequence_length=8)).fingerprint == prints[-1]


def test_damaged_cache_is_made_again(make: Make) -> None:
    first = prepare(make())
    content = first.sources[0].train.read_bytes()
    first.sources[0].train.write_bytes(content[:-2])
    again = prepare(make())
    assert again == first
    assert again.sources[0].train.read_bytes() == content
    (first.sources[0].train.parent / "corpus.json").write_text("{")
    assert prepare(make()) == first
    shutil.rmtree(first.sources[0].train.parent)
    assert prepare(make()).sources[0].train.read_bytes() == content


def test_processes_at_once_make_it_once(make: Make, tmp_path: Path) -> None:
    config = make()
    gate = multiprocessing.get_context("fork").Barrier(3)

    def run(*_: int) -> tuple[str, str]:
        log = io.StringIO()
        logging.basicConfig(level=logging.INFO, stream=log, force=True)
        gate.wait(60)
        return prepare(config).fingerprint, log.getvalue()

    ended = run_ranks(run, 3, init=False)
    assert len({fingerprint for fingerprint, _ in ended}) == 1  # type: ignore[misc]
    assert sum("trained the tokenizer" in log for _, log in ended) == 1  # type: ignore[misc]
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


def test_files_that_are_no_text_are_left_out(make: Make, text: Path) -> None:
    (text / "latin.py").write_bytes(b"# caf\xe9\n" * 50)
    (text / "nul.py").write_bytes(b"a\0b" * 50)
    prepared = prepare(make(validation_fraction=0.2))
    found = texts_of(prepared, prepared.sources[0].train)
    found += texts_of(prepared, prepared.sources[0].validation)
    assert len(found) == 40


def test_given_tokenizer_is_used_and_is_part_of_the_fingerprint(make: Make, tmp_path: Path) -> None:
    trained = prepare(make())
    file = tmp_path / "tokenizer.json"
    shutil.copy(trained.tokenizer_file, file)
    prepared = prepare(make(tokenizer={"file": str(file)}))
    assert prepared.tokenizer_file.read_bytes() == file.read_bytes()
    assert prepared.sources[0].train.read_bytes() == trained.sources[0].train.read_bytes()
    changed = json.loads(file.read_text())
    changed["added_tokens"][0]["content"] = "</s>"
    changed["model"]["vocab"]["</s>"] = changed["model"]["vocab"].pop("<|endoftext|>")
    file.write_text(json.dumps(changed))
    assert prepare(make(tokenizer={"file": str(file)})).fingerprint != prepared.fingerprint


def test_unusable_tokenizer_file_is_refused_and_leaves_nothing(make: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.file=.* does not exist"):
        prepare(make(tokenizer={"file": str(tmp_path / "no.json")}))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tok"):
        prepare(make(tokenizer={"file": str(tmp_path / "bad.json")}))
    corpora = tmp_path / "cache" / "corpora"
    assert not corpora.exists() or list(corpora.iterdir()) == []


def test_one_file_is_held_out_from_a_line_on(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    text = "".join(f"line {index} of the only file é\n" for index in range(300))
    path.write_text(text, encoding="utf-8")
    prepared = prepare(make(corpus=(str(path),), validation_fraction=0.1))
    (train,) = texts_of(prepared, prepared.sources[0].train)
    (held,) = texts_of(prepared, prepared.sources[0].validation)
    assert train + held == text
    assert train.endswith("\n")
    assert 0.08 < len(held) / len(text) <= 0.1


@pytest.mark.parametrize("content", [b"\x00\x01" * 900, b"one line without an end"])
def test_corpus_without_two_parts_is_refused(make: Make, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(content)
    message = "is one line" if b"line" in content else r"has no UTF-8 text.*is it binary or empty\?"
    with pytest.raises(ValueError, match=message):
        prepare(make(corpus=(str(path),)))


def rows_of(path: Path, count: int, word: str) -> Path:
    rows = [{"text": f"{word} {index} " + "é" * (index % 5)} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_sources_are_kept_each_by_itself(make: Make, tmp_path: Path) -> None:
    trained = prepare(make()).tokenizer_file.parent
    first = SourceConfig(name="a", corpus=(str(rows_of(tmp_path / "a.jsonl", 50, "a")),))
    second = SourceConfig(name="b", corpus=(str(rows_of(tmp_path / "b.jsonl", 40, "b")),), weight=3)
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    config = replace(make(tokenizer={"file": str(trained)}), data=data)
    alone = prepare(replace(config, sources=(first,)))
    both = prepare(replace(config, sources=(first, second)))
    assert [source.name for source in both.sources] == ["a", "b"]
    assert both.sources[0] == alone.sources[0]
    assert [source.weight for source in both.sources] == [1, 3]
    assert both.fingerprint not in (alone.fingerprint, both.sources[1].fingerprint)
    texts = texts_of(both, both.sources[1].train) + texts_of(both, both.sources[1].validation)
    assert len(texts) == 40 and all(text.startswith("b ") for text in texts)
    # Without a tokenizer one is trained on the texts of all sources.
    mixed = replace(config, tokenizer=TokenizerConfig(vocab_size=280), sources=(first, second))
    prepared = prepare(mixed)
    assert prepared.sources[0].fingerprint != alone.sources[0].fingerprint
    assert len(texts_of(prepared, prepared.sources[0].train)) > 40
    assert prepare(mixed) == prepared


def test_compressed_rows_are_the_same_tokens_and_nothing_is_left(
    make: Make, tmp_path: Path
) -> None:
    path = rows_of(tmp_path / "a.jsonl", 60, "a")
    plain = prepare(make(corpus=(str(path),)))
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed = prepare(make(corpus=(str(tmp_path / "z" / "a.jsonl.gz"),)))
    texts = [
        sorted(texts_of(each, each.sources[0].train) + texts_of(each, each.sources[0].validation))
        for each in (plain, packed)
    ]
    assert texts[0] == texts[1]
    assert not list((tmp_path / "cache" / "unpacked").iterdir())
    assert not list((tmp_path / "cache" / "pieces").iterdir())


def test_a_job_does_not_take_away_what_another_one_has_unpacked(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows_of(tmp_path / "a.jsonl", 60, "a")
    plain = prepare(make(corpus=(str(path),)))
    packed = tmp_path / "z" / "a.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    others: list[PreparedCorpus] = []

    class Other(logging.Handler):
        """When a job has unpacked its files, another one with the same files runs to its end."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("preparing source") and not others:
                others.append(plain)
                others[0] = prepare(make(corpus=(str(packed),), validation_fraction=0.3))

    caplog.set_level(logging.INFO)
    logger, other = logging.getLogger("moe_train.data.prepare"), Other()
    logger.addHandler(other)
    try:
        found = prepare(make(corpus=(str(packed),)))
    finally:
        logger.removeHandler(other)
    for each in (found, *others):
        texts = [
            texts_of(each, path) for path in (each.sources[0].train, each.sources[0].validation)
        ]
        assert len(texts[0]) + len(texts[1]) == 60
    assert found.fingerprint != others[0].fingerprint != plain.fingerprint


def test_without_locks_processes_leave_each_others_work_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows_of(tmp_path / "a.jsonl", 60, "a")
    path.write_text(path.read_text() + "\n")  # the empty line is said while files are joined
    whole = prepare(make(corpus=(str(path),), cache_dir=str(tmp_path / "other")))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    others: list[PreparedCorpus] = []

    class Other(logging.Handler):
        """While a process joins its files, another one does the same work to its end."""

        def emit(self, record: logging.LogRecord) -> None:
            if "left out" in record.msg and not others:
                others.append(whole)
                others[0] = prepare(make(corpus=(str(path),)))

    caplog.set_level(logging.INFO)
    logger, other = logging.getLogger("moe_train.data.prepare"), Other()
    logger.addHandler(other)
    try:
        found = prepare(make(corpus=(str(path),)))
    finally:
        logger.removeHandler(other)
    assert others == [found]
    assert found.fingerprint == whole.fingerprint
    assert found.sources[0].train.read_bytes() == whole.sources[0].train.read_bytes()
    for name in ("pieces", "unpacked"):
        assert not list((tmp_path / "cache").glob(f"{name}/*"))
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


def test_a_job_has_its_own_files_of_a_tokenizer_that_the_cache_knows(
    make: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(prepare(make()).tokenizer_file.parent, folder)
    config = make(tokenizer={"file": str(folder)})
    given = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    first = prepare(config)
    assert first.tokenizer.files["generation_config.json"] == given["generation_config.json"]
    changed = given["generation_config.json"].replace(b"true", b"false")
    (folder / "generation_config.json").write_bytes(changed)
    second = prepare(config)
    assert (second.fingerprint, second.sources) == (first.fingerprint, first.sources)
    assert second.tokenizer.files["generation_config.json"] == changed
    assert second.tokenizer.files["tokenizer.json"] == given["tokenizer.json"]
    assert prepare(config) == second
    (folder / "generation_config.json").unlink()
    assert prepare(config).tokenizer_file != second.tokenizer_file


@pytest.mark.parametrize("kind", ["chat", "tokens"])
def test_what_needs_a_tokenizer_asks_for_one(make: Make, tmp_path: Path, kind: str) -> None:
    path = rows_of(tmp_path / "a.jsonl", 5, "a")
    with pytest.raises(ValueError, match=r"set tokenizer\.file"):
        prepare(make(corpus=(str(path),), kind=kind))


def test_unigram_cross_entropy_equals_a_count_by_hand(make: Make) -> None:
    prepared = prepare(make(validation_fraction=0.3))
    train = open_store(prepared.sources[0].train).tokens.tolist()
    _, split = open_joined(prepared, sequence_length=16, reset_at_documents=True)
    numbers = list(range(0, split.num_sequences, 2))
    labels = [
        label
        for row in split.batch(numbers).labels.tolist()
        for label in row
        if label != IGNORED_LABEL
    ]
    size = prepared.vocab_size
    expected = -np.mean([np.log((train.count(t) + 1) / (len(train) + size)) for t in labels])
    found = unigram_cross_entropy(prepared, 16, sequence_indices=np.array(numbers))
    assert found == pytest.approx(expected, rel=1e-12)
    assert unigram_cross_entropy(prepared, 16) == pytest.approx(expected, rel=0.1)


def test_another_index_of_a_megatron_file_is_another_corpus(
    make: Make, trained_run: Path, tmp_path: Path
) -> None:
    def write_index(*lengths: int) -> None:
        ends = np.cumsum([0, *lengths])
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
        tables = np.array(lengths, "<i4"), ends[:-1] * 2, np.arange(len(lengths) + 1)
        index = header + b"".join(table.tobytes() for table in tables)
        (tmp_path / "rows.idx").write_bytes(index)

    path = tmp_path / "rows.bin"
    path.write_bytes((np.arange(60, dtype="<u2") + 50).tobytes())
    own = {"file": str(trained_run / "checkpoint-2")}
    config = make(tokenizer=own, corpus=(str(path),), kind="tokens", validation_fraction=0.3)
    found = []
    for lengths in ((20, 20, 20), (15, 25, 20), (10,) * 6, (20, 20, 20)):
        write_index(*lengths)
        source = (prepared := prepare(config)).sources[0]
        starts = [open_store(each).starts.tolist() for each in (source.train, source.validation)]
        sizes = [end - start for each in starts for start, end in pairwise(each)]
        assert sorted(sizes) == sorted(lengths)
        found.append(prepared.fingerprint)
    assert found[0] == found[3]
    assert len(set(found)) == 3
