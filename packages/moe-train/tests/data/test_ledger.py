import json

import numpy as np
import pytest

from moe_train.data.ledger import DataIdentity, Ledger, check_value, id_hashes
from moe_train.data.mixture import SourceShare

DATA = DataIdentity(
    fingerprint="abc",
    sequence_length=8,
    seed=3,
    sources=(
        SourceShare(name="a", weight="0.7", num_sequences=30),
        SourceShare(name="b", weight="0.3", num_sequences=20),
    ),
)
OTHER = DataIdentity(fingerprint="def", sequence_length=8, seed=3, sources=DATA.sources)


def record(ledger: Ledger, *steps: tuple[int, int, int], data: DataIdentity = DATA) -> None:
    for step, first_sample, size in steps:
        ledger.record(
            step=step, first_sample=first_sample, global_batch_size=size, data=data, check=step
        )


def test_steps_alike_are_one_segment_and_a_change_begins_another() -> None:
    ledger = Ledger()
    record(ledger, (1, 0, 4), (2, 4, 4), (3, 8, 6), (4, 14, 6))
    record(ledger, (5, 20, 6), data=OTHER)
    record(ledger, (7, 26, 6), (8, 30, 6), data=OTHER)
    found = [(s.first_step, s.end_step, s.first_sample, s.end_sample) for s in ledger.segments]
    assert found == [(1, 3, 0, 8), (3, 5, 8, 20), (5, 6, 20, 26), (7, 8, 26, 32), (8, 9, 30, 36)]
    assert ledger.segments[1].samples(4).tolist() == list(range(14, 20))


def test_a_ledger_is_read_as_it_was_written_and_costs_bytes_a_step() -> None:
    ledger = Ledger()
    for step in range(1, 5001):
        ledger.record(
            step=step,
            first_sample=16 * (step - 1),
            global_batch_size=16,
            data=DATA,
            check=(step * 2654435761) % 2**32,
            skipped=step == 7,
        )
    text = ledger.to_json()
    assert len(text) < 6 * 5000
    read = Ledger.from_json(text, "samples.json")
    assert read == ledger
    assert read.segments[0].skipped == [7]
    assert json.loads(text)["segments"][0]["last_step"] == 5000


@pytest.mark.parametrize(
    "change",
    [
        {"last_step": 3},
        {"checks": "AAAA"},
        {"checks": "?"},
        {"sources": [{"name": "a"}]},
        {"seed": None},
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    ledger = Ledger()
    record(ledger, (1, 0, 4), (2, 4, 4))
    values = json.loads(ledger.to_json())
    values["segments"][0] |= change
    with pytest.raises(ValueError, match=r"^x/samples.json is no ledger of samples"):
        Ledger.from_json(json.dumps(values).encode(), "x/samples.json")
    with pytest.raises(ValueError, match="format 2"):
        Ledger.from_json(b'{"format": 2}', "x")


def test_check_values_differ_for_other_ids_and_not_for_another_order() -> None:
    source, sequence = np.array([0, 0, 1, 1]), np.array([5, 6, 5, 7])
    hashes = id_hashes(source, sequence)
    assert hashes.min() >= 0 and hashes.max() < 2**32
    own = check_value(4, int(hashes.sum()))
    assert own == check_value(4, int(hashes[::-1].sum()))
    others = [
        (source, sequence + np.array([0, 0, 0, 1])),
        (1 - source, sequence),
        (source, sequence[::-1]),
    ]
    assert all(own != check_value(4, int(id_hashes(s, q).sum())) for s, q in others)
    assert own != check_value(3, int(hashes[:3].sum()))


def test_hashes_of_a_million_ids_hardly_ever_agree() -> None:
    hashes = id_hashes(np.repeat([0, 1], 500_000), np.tile(np.arange(500_000), 2))
    assert len(np.unique(hashes)) > 999_000 - 2000
