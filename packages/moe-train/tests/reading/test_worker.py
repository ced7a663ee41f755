import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_train.reading.encode import EncodeJob
from moe_train.reading.formats import DataFile
from moe_train.reading.pieces import read_piece
from moe_train.reading.spans import Span
from moe_train.reading.worker import make_piece, piece_path, store_task, take_piece
from moe_train.tokenization import TextTokenizer


def test_a_process_that_reads_does_not_import_torch() -> None:
    check = "import sys, moe_train.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.fixture
def span(tmp_path: Path, tokenizer: TextTokenizer) -> Span:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    size = path.stat().st_size
    file = DataFile(name="a", path=path, shown="a", format="jsonl", size_bytes=size)
    job = EncodeJob(kind="text", field="text", dtype="", hold_below=1 << 62, keep_below=None)
    store_task(tmp_path, job, tokenizer)
    return Span(file=file, start=0, stop=size, size_bytes=size)


def test_a_piece_is_made_once(tmp_path: Path, span: Span) -> None:
    assert make_piece(tmp_path, 3, [span]) == 3
    stamp = piece_path(tmp_path, 3).stat().st_mtime_ns
    make_piece(tmp_path, 3, [span])
    assert piece_path(tmp_path, 3).stat().st_mtime_ns == stamp


def test_a_damaged_piece_is_made_again(tmp_path: Path, span: Span) -> None:
    whole = take_piece(tmp_path, 0, [span]).parts["train"].tokens.tolist()
    path = piece_path(tmp_path, 0)
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
    assert read_piece(path) is None
    assert take_piece(tmp_path, 0, [span]).parts["train"].tokens.tolist() == whole
    assert read_piece(path) is not None
