from ranktest.memory import forget_peak, peak_resident_bytes, resident_bytes

SIZE_BYTES = 64 << 20


def test_the_peak_is_what_was_resident_and_begins_again_when_it_is_forgotten() -> None:
    before = resident_bytes()
    block = bytearray(b"1") * SIZE_BYTES
    assert resident_bytes() - before >= 0.9 * SIZE_BYTES
    del block
    assert peak_resident_bytes() - resident_bytes() >= 0.9 * SIZE_BYTES
    forget_peak()
    assert peak_resident_bytes() - resident_bytes() < 0.5 * SIZE_BYTES
