import random
from pathlib import Path

import pytest

from moe_train.reading.formats import DataFile
from moe_train.reading.plan import split_documents


def document(index: int, size: int) -> DataFile:
    name = f"n{index}"
    return DataFile(name=name, path=Path(f"/{index}"), shown=name, format="text", size_bytes=size)


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.1, 0.5])
def test_split_comes_near_the_fraction_and_neither_side_is_empty(fraction: float) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    documents = [document(i, rng.randint(1, 2000)) for i in range(rng.randint(2, 400))]
    train, held = split_documents(documents, fraction)
    total = sum(d.size_bytes for d in documents)
    share = sum(d.size_bytes for d in held) / total
    assert train and held, seed
    assert sorted([*train, *held], key=documents.index) == documents, seed
    assert share <= fraction or len(held) == 1, seed
    if len(documents) > 100 and fraction >= 0.02:
        assert share > fraction * 0.8, seed


def test_split_changes_little_when_a_document_is_added() -> None:
    documents = [document(i, 100) for i in range(200)]
    _, before = split_documents(documents, 0.1)
    _, after = split_documents([*documents, document(1000, 100)], 0.1)
    assert len(set(before) ^ set(after)) <= 2
