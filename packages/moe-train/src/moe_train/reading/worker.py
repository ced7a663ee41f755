"""What a process runs that makes pieces: it starts without torch, and ends when its parent does.

store_task(folder, job, tokenizer)
with ProcessPoolExecutor(4, spawn, start_worker) as pool:
    pool.submit(make_piece, folder, 7, spans)       # folder/000007.piece
"""

import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from moe_train.reading.encode import EncodedPiece, EncodeJob, encode_piece
from moe_train.reading.pieces import read_piece, write_piece
from moe_train.reading.spans import Span
from moe_train.tokenization import TextTokenizer

_TASK = "task.pickle"


def start_worker() -> None:
    """Make this process one of many: one thread, no answer to Ctrl-C, gone with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def store_task(folder: Path, job: EncodeJob, tokenizer: TextTokenizer) -> None:
    """Leave in the folder what every process needs."""
    work = folder / f"{_TASK}.{os.getpid()}"
    work.write_bytes(pickle.dumps((job, tokenizer)))
    work.replace(folder / _TASK)


def piece_path(folder: Path, index: int) -> Path:
    """The file of a piece."""
    return folder / f"{index:06}.piece"


def make_piece(folder: Path, index: int, spans: Sequence[Span]) -> int:
    """Make one piece, unless it is there; returns its number."""
    path = piece_path(folder, index)
    if not path.exists():
        job, tokenizer = _task(folder)
        write_piece(path, encode_piece(spans, job, tokenizer))
    return index


def take_piece(folder: Path, index: int, spans: Sequence[Span]) -> EncodedPiece:
    """A piece that was made; a damaged one is made again.

    Raises:
        OSError: the disk gives back other bytes than were written, twice.
    """
    for _ in range(2):
        piece = read_piece(piece_path(folder, index))
        if piece is not None:
            return piece
        piece_path(folder, index).unlink(missing_ok=True)
        make_piece(folder, index, spans)
    raise OSError(f"{piece_path(folder, index)} does not keep what is written to it")


@functools.lru_cache(maxsize=1)
def _task(folder: Path) -> tuple[EncodeJob, TextTokenizer]:
    loaded: Any = pickle.loads((folder / _TASK).read_bytes())
    job, tokenizer = loaded
    return job, tokenizer


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
