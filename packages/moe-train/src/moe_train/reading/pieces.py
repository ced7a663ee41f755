"""A tokenized piece on disk, so that an interrupted preparation goes on where it was.

Invariant: a file under its final name is complete and on the disk; one whose bytes changed since is
not read.

    write_piece(Path("000007.piece"), encode_piece(spans, job, tokenizer))
    read_piece(Path("000007.piece"))        # None: there is none, or it is damaged
"""

import json
import os
import zlib
from pathlib import Path

import numpy as np

from moe_train.reading.encode import EncodedPart, EncodedPiece


def write_piece(path: Path, piece: EncodedPiece) -> None:
    """Write a piece under a temporary name, and rename it when it is on the disk."""
    arrays, parts, checksum = [], {}, 0
    for name, part in piece.parts.items():
        mask = np.empty(0, np.uint8) if part.trained is None else part.trained
        arrays += [part.tokens, part.begins, mask]
        parts[name] = {
            "dtype": part.tokens.dtype.str,
            "num_tokens": len(part.tokens),
            "num_documents": len(part.begins),
            "masked": part.trained is not None,
        }
    blobs = [array.tobytes() for array in arrays]
    for blob in blobs:
        checksum = zlib.crc32(blob, checksum)
    header = {"parts": parts, "left_out": dict(piece.left_out), "checksum": checksum}
    work = path.with_suffix(f".{os.getpid()}")
    with work.open("wb") as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        stream.writelines(blobs)
        stream.flush()
        os.fsync(stream.fileno())
    work.replace(path)


def read_piece(path: Path) -> EncodedPiece | None:
    """A piece, or None where there is none or its bytes changed."""
    try:
        with path.open("rb") as stream:
            header = json.loads(stream.readline())
            data = stream.read()
        if zlib.crc32(data) != header["checksum"]:
            return None
        parts, at = {}, 0
        for name, facts in header["parts"].items():
            dtype, tokens, documents = facts["dtype"], facts["num_tokens"], facts["num_documents"]
            ids = np.frombuffer(data, dtype, tokens, at)
            begins = np.frombuffer(data, "<i8", documents, at + ids.nbytes)
            at += ids.nbytes + begins.nbytes
            trained = None
            if facts["masked"]:
                trained = np.frombuffer(data, np.uint8, tokens, at)
                at += tokens
            parts[name] = EncodedPart(tokens=ids, begins=begins, trained=trained)
        return EncodedPiece(parts=parts, left_out=header["left_out"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
