"""A tokenizer with a chat template, and sources read as preparing reads them."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from moe_train.config import SourceConfig
from moe_train.config.data_tables import DataConfig
from moe_train.reading.encode import encode_piece
from moe_train.reading.formats import DataFile
from moe_train.reading.plan import find_files, plan_source
from moe_train.tokenization import TextTokenizer, load_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}]{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
END = 0


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=259,
        special_tokens=["<|end|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["ab"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


class Read:
    """What came of a source: texts of documents and of what is trained on, by split."""

    def __init__(self) -> None:
        self.documents: dict[str, list[str]] = {"train": [], "validation": []}
        self.ids: dict[str, list[list[int]]] = {"train": [], "validation": []}
        self.trained: dict[str, list[list[int]]] = {"train": [], "validation": []}
        self.left_out: Counter[str] = Counter()
        self.num_pieces = 0

    @property
    def all(self) -> list[str]:
        return self.documents["train"] + self.documents["validation"]


@pytest.fixture
def read(tmp_path: Path, tokenizer: TextTokenizer) -> Callable[..., Read]:
    """`read(path, kind="chat")` reads a source whole; documents are decoded, end tokens shown."""

    def run(*corpus: Path, fraction: float = 0.3, **keys: object) -> Read:
        named = SourceConfig(name="s", corpus=tuple(map(str, corpus)), **keys)  # type: ignore[arg-type]
        source = named.filled(DataConfig())
        plan = plan_source(
            source,
            find_files(source),
            fraction=fraction,
            end_id=END,
            unpacked=tmp_path / "unpacked",
        )
        found = Read()
        found.left_out.update(plan.left_out)
        found.num_pieces = len(plan.pieces)
        tokens: dict[str, list[int]] = {"train": [], "validation": []}
        masks: dict[str, list[int]] = {"train": [], "validation": []}
        begins: dict[str, list[int]] = {"train": [], "validation": []}
        for spans in plan.pieces:
            piece = encode_piece(spans, plan.job, tokenizer)
            found.left_out.update(piece.left_out)
            for name, part in piece.parts.items():
                begins[name] += (part.begins + len(tokens[name])).tolist()
                tokens[name] += part.tokens.tolist()
                ones = np.ones(len(part.tokens), np.uint8)
                masks[name] += (ones if part.trained is None else part.trained).tolist()
        for name, starts in begins.items():
            assert not tokens[name] or starts[0] == 0
            for start, end in zip(starts, [*starts[1:], len(tokens[name])], strict=True):
                found.ids[name].append(tokens[name][start:end])
                found.trained[name].append(masks[name][start:end])
                text = tokenizer.decode(tokens[name][start:end], skip_special_tokens=False)
                found.documents[name].append(text)
        return found

    return run


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """`jsonl(rows)` writes rows, one object a line."""

    def write(rows: Sequence[object], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def data_file() -> Callable[[Path, str], DataFile]:
    """`data_file(path, "jsonl")` is the file as it is found."""

    def make(path: Path, format: str) -> DataFile:
        size = path.stat().st_size
        return DataFile(name=path.name, path=path, shown=str(path), format=format, size_bytes=size)

    return make
