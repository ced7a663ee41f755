import random
from pathlib import Path

import numpy as np
import pytest

from moe_train.reading.encode import EncodedPart, EncodedPiece
from moe_train.reading.pieces import read_piece, write_piece


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_piece_reads_back_and_a_changed_one_does_not(tmp_path: Path, dtype: type) -> None:
    masked = EncodedPart(
        tokens=np.arange(9, dtype=dtype), begins=np.array([0, 4]), trained=np.ones(9, np.uint8)
    )
    plain = EncodedPart(
        tokens=np.arange(3, dtype=dtype), begins=np.array([], np.int64), trained=None
    )
    path = tmp_path / "000000.piece"
    piece = EncodedPiece(parts={"train": masked, "validation": plain}, left_out={"rows": 2})
    write_piece(path, piece)
    found = read_piece(path)
    assert found is not None and found.left_out == {"rows": 2}
    for name, part in piece.parts.items():
        assert found.parts[name].tokens.tolist() == part.tokens.tolist()
        assert found.parts[name].tokens.dtype == dtype
        assert found.parts[name].begins.tolist() == part.begins.tolist()
        assert (found.parts[name].trained is None) == (part.trained is None)
    content = path.read_bytes()
    place = random.randrange(len(content))
    changed = bytearray(content)
    changed[place] ^= 255
    path.write_bytes(changed)
    assert read_piece(path) is None, place
    path.write_bytes(content[:place])
    assert read_piece(path) is None, place
    assert read_piece(tmp_path / "none") is None
    assert len(list(tmp_path.iterdir())) == 1
