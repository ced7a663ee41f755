"""What a process runs that makes pieces: it starts without torch, and ends when its parent does.

store_task(folder, job, tokenizer)
make_piece(folder, 7, spans)            # folder/000007.piece
serve(connection)                       # the same for whoever has the other end
"""

import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_train.reading.encode import EncodedPiece, EncodeJob, encode_piece
from moe_train.reading.pieces import read_piece, write_piece
from moe_train.reading.spans import Span
from moe_train.tokenization import TextTokenizer

_TASK = "task.pickle"


def serve(connection: Connection) -> None:
    """Make the pieces that are asked for, and answer each with None or with what was raised.

    One thread, no answer to Ctrl-C; ends in the midst of a piece where the process that asks ends.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread = ThreadPoolExecutor(1)
    try:
        while True:
            piece = connection.recv()
            thread.submit(make_piece, *piece).add_done_callback(partial(_answer, connection))
    finally:
        os._exit(1)


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


@lru_cache(maxsize=1)
def _task(folder: Path) -> tuple[EncodeJob, TextTokenizer]:
    loaded: Any = pickle.loads((folder / _TASK).read_bytes())
    job, tokenizer = loaded
    return job, tokenizer


def _answer(connection: Connection, done: "Future[int]") -> None:
    failure, is_sent = done.exception(), False
    if failure is not None:
        failure.add_note("".join(traceback.format_exception(failure)))
    try:
        connection.send(failure)
        is_sent = True
    finally:
        if not is_sent:
            os._exit(1)  # so that nobody waits for it
