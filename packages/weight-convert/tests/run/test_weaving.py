import os
import random
from pathlib import Path

import numpy as np
import pytest

from weight_convert.outputs import Computed, PlannedTensor, Weave
from weight_convert.outputs.tensors import Piece
from weight_convert.run import weaving
from weight_convert.staging import OpenFiles


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_rows_are_those_that_numpy_concatenates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(weaving, "BLOCK_BYTES", block_bytes)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    rows, widths = rng.randint(1, 9), [rng.randint(1, 20) for _ in range(3)]
    arrays = [np.frombuffer(os.urandom(rows * w), np.uint8).reshape(rows, w) for w in widths]
    inputs = []
    for number, array in enumerate(arrays):
        (tmp_path / str(number)).write_bytes(b"head" + array.tobytes())
        cut = rng.randint(0, array.size)  # a tensor of two pieces
        pieces = tuple(
            Piece(file=number, offset_bytes=4 + begin, size_bytes=end - begin)
            for begin, end in ((0, cut), (cut, array.size))
            if end > begin
        )
        ends = (cut, array.size) if len(pieces) > 1 else ()
        inputs.append(
            PlannedTensor(
                key="x", dtype="U8", shape=array.shape, pieces=pieces, order=((), 0, 0), ends=ends
            )
        )
    runs, parts = [], []
    for _ in range(4):
        number = rng.randrange(3)
        begin = rng.randrange(widths[number])
        length = rng.randint(1, widths[number] - begin)
        runs.append(
            Weave.Run(
                input=number, offset_bytes=begin, stride_bytes=widths[number], size_bytes=length
            )
        )
        parts.append(arrays[number][:, begin : begin + length])
    weave = Weave(num_rows=rows, runs=tuple(runs), zero_bytes=5)
    computed = Computed(operation=weave, inputs=tuple(inputs), key="x", dtype="U8", shape=(1,))
    with OpenFiles([tmp_path / str(number) for number in range(3)]) as files:
        found = b"".join(weaving.woven(weave, computed, files))
    assert found == np.concatenate(parts, axis=1).tobytes() + bytes(5), seed
