"""Pickles are read as data: what numpy writes is found, code is named and never run."""

import io
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.pickles import dcp_pickle, paddle_parts, read_paddle_file, torch_pickle
from weight_convert.pickles.dcp_folder import read_dcp
from weight_convert.pickles.reading import Call, read_pickle

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "bf16": np.arange(5, dtype=np.uint16),
    "empty": np.zeros((0, 3), dtype=np.int64),
    "scalar": np.array(3, dtype=np.int32),
}


class Runs:
    """What a hostile file holds."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-run",)


def test_arrays_are_found_at_their_place(tmp_path: Path) -> None:
    path = tmp_path / "model_state.pdparams"
    named = {key: (f"linear_{key}", value) for key, value in ARRAYS.items()}
    for state in (ARRAYS, named):
        path.write_bytes(pickle.dumps({**state, "note": 3}, protocol=4))
        entries, skipped = read_paddle_file(path)
        content = path.read_bytes()
        assert skipped == ["note"]
        assert {e.key: content[e.offset_bytes :][: e.size_bytes] for e in entries} == {
            key: value.tobytes() for key, value in ARRAYS.items()
        }
        assert {e.key: (e.dtype, e.shape) for e in entries}["bf16"] == ("BF16", (5,))


def test_what_is_written_is_what_pickle_reads() -> None:
    kinds = [("a", "F32", (3, 2)), ("b", "BF16", ()), ("c", "BOOL", (4,))]
    data = [bytes(range(24)), b"\1\2", b"\1\0\1\0"]
    parts = paddle_parts(kinds)
    whole = b"".join(known + one for known, one in zip(parts, [*data, b""], strict=True))
    found = pickle.loads(whole)
    assert found.pop("StructuredToParameterName@@") == {}
    assert [(v.shape, v.dtype.name, v.tobytes()) for v in found.values()] == [
        ((3, 2), "float32", data[0]),
        ((), "uint16", data[1]),
        ((4,), "bool", data[2]),
    ]
    with pytest.raises(WeightConvertError, match=r"F8_E4M3, which \.pdparams cannot hold"):
        paddle_parts([("a", "F8_E4M3", (1,))])


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_code_is_named_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model_state.pdparams"
    path.write_bytes(pickle.dumps({"w": Runs()}, protocol=protocol))
    with pytest.raises(
        CorruptFileError, match="names (posix|os).system" if protocol else "no pick"
    ):
        read_paddle_file(path)
    assert not (tmp_path / "was-run").exists()


def test_a_call_is_data() -> None:
    stream = io.BytesIO(b"\x80\x04cbuiltins\ntuple\n)R.")
    found = read_pickle(stream, Path("x"), allowed=frozenset({"builtins.tuple"}))
    assert isinstance(found, Call) and (found.name, found.args) == ("builtins.tuple", ())


@pytest.mark.parametrize("kind", ["pdparams", "torch", "dcp"])
def test_damaged_pickles_end_in_one_error(tmp_path: Path, kind: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    good = {
        "pdparams": lambda: pickle.dumps(ARRAYS, protocol=4),
        "torch": lambda: torch_pickle([("a", "F32", (3, 4)), ("b", "F8_E4M3", (2,))]),
        "dcp": lambda: dcp_pickle([]),
    }[kind]()
    path = tmp_path / ("model_state.pdparams" if kind != "dcp" else ".metadata")
    for number in range(300):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if number % 3 == 0 else data)
        try:
            _ = read_dcp(tmp_path) if kind == "dcp" else read_paddle_file(path)
        except WeightConvertError as error:
            assert str(tmp_path) in str(error) or ".metadata" in str(error), seed
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}") from error


def test_a_size_beyond_the_file_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model_state.pdparams"
    path.write_bytes(b"\x80\x04\x8e" + (100 << 30).to_bytes(8, "little") + b"x.")
    with pytest.raises(CorruptFileError, match="107374182400 bytes are said to stand at byte 11"):
        read_paddle_file(path)
