import subprocess
import sys

from ranktest.memory import forget_peak, peak_resident_bytes, resident_bytes

SIZE_BYTES = 64 << 20


def test_the_peak_is_what_was_resident_and_begins_again_when_it_is_forgotten() -> None:
    forget_peak()  # or the block would lie in what earlier tests have freed
    before = resident_bytes()
    block = bytearray(b"1") * SIZE_BYTES
    assert resident_bytes() - before >= 0.9 * SIZE_BYTES
    del block
    assert peak_resident_bytes() - resident_bytes() >= 0.9 * SIZE_BYTES
    forget_peak()
    assert peak_resident_bytes() - resident_bytes() < 0.5 * SIZE_BYTES


def test_what_was_free_before_is_not_growth_that_goes_unseen() -> None:
    pieces = [bytes(10_000) + bytes([number % 256]) for number in range(SIZE_BYTES // 10_000)]
    pinned = pieces[-1]  # the end of the heap stays in use, so nothing is given back by itself
    del pieces
    forget_peak()
    before = resident_bytes()
    again = [bytes(10_000) + bytes([number % 256]) for number in range(SIZE_BYTES // 10_000)]
    assert peak_resident_bytes() - before >= 0.9 * SIZE_BYTES
    assert pinned and again


def test_a_freed_block_stays_resident_until_it_is_asked_that_none_does() -> None:
    program = """if True:
        import sys
        from ranktest.memory import keep_no_freed_memory, resident_bytes
        if sys.argv[1] == "True":
            keep_no_freed_memory()
        block = bytearray(24 << 20)
        del block  # from now on glibc itself would keep what is smaller
        before = resident_bytes()
        block = bytearray(b"1") * (16 << 20)
        del block
        print(resident_bytes() - before)
    """
    for gives_back in (False, True):  # in processes of their own, whose heap is as it was at first
        asked = [sys.executable, "-c", program, str(gives_back)]
        kept = int(subprocess.run(asked, check=True, capture_output=True, timeout=300).stdout)
        assert (kept < 1 << 20) == gives_back, kept
