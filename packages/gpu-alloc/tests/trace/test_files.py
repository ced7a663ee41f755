import random
from pathlib import Path

import pytest

from gpu_alloc import AllocError, TraceEvent, load_trace, save_trace

HEADER = '{"format": "gpu-alloc-trace", "version": 2}\n'


def test_saved_trace_loads_equal(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    events = [
        TraceEvent(
            action=rng.choice(("alloc", "free")),
            block_id=rng.randrange(1 << 60),
            size_bytes=rng.randrange(1 << 40),
            stream=rng.choice((0, -3, 1 << 50)),
        )
        for _ in range(200)
    ]
    path = tmp_path / "trace.jsonl"
    assert save_trace(iter(events), path) == 200
    assert load_trace(path) == events, f"seed {seed}"
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]


def test_empty_trace_is_a_trace(tmp_path: Path) -> None:
    save_trace([], tmp_path / "empty")
    assert load_trace(tmp_path / "empty") == []


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    event = TraceEvent(action="alloc", block_id=1, size_bytes=2)
    save_trace([event], path)

    def broken() -> object:
        yield event
        raise RuntimeError("recorder died")

    with pytest.raises(RuntimeError, match="recorder died"):
        save_trace(broken(), path)
    assert load_trace(path) == [event]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "in the first line, got ''; write traces with `gpu-alloc record`"),
        ("[]\n", "in the first line, got '[]'"),
        ('{"action": "alloc"}\n', ":1: expected"),
        ('{"format": "gpu-alloc-trace", "version": 3}\n', "update gpu-alloc"),
        (HEADER + "{\n", ":2: not JSON"),
        (HEADER + '\n{"action": "alloc", "block_id": 1}\n', ":3: unknown keys"),
        (HEADER + '{"action": "alloc", "block_id": 1, "size_bytes": 1, "x": 0}\n', "'x'"),
        (HEADER + '{"action": "grow", "block_id": 1, "size_bytes": 1}\n', ":2: action 'grow'"),
        (HEADER + '{"action": "alloc", "block_id": 1, "size_bytes": -1}\n', ":2: size_bytes=-1"),
        (HEADER + '{"action": "alloc", "block_id": true, "size_bytes": 1}\n', ":2: block_id=True"),
        (HEADER + '{"action": "alloc", "block_id": 1, "size_bytes": 1.0}\n', "expected an integer"),
        (HEADER + '{"action": [], "block_id": 1, "size_bytes": 1}\n', ":2: action"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(AllocError) as caught:
        load_trace(path)
    assert said in str(caught.value)
    assert "bad.jsonl" in str(caught.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AllocError, match="not text"):
        load_trace(path)
