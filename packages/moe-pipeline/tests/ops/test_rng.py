import math

import pytest
import torch

from moe_pipeline.ops.rng import counter_blocks, counter_key, counter_normal, counter_uniform

MASK = (1 << 64) - 1


def signed(value):
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def finish(z):
    """The hash in Python's unbounded integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = signed((z ^ (z >> shift)) * factor)
    return signed(z + (z >> 32))


def reference_bits(key, token, column):
    """The 32 bits of one number, by the definition."""
    golden, tag = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
    row = finish(signed(token * golden + counter_key(key, 0)))
    lane = finish(signed(column // 2 * golden + counter_key(key, tag)))
    z = finish(signed(row + lane)) & MASK
    return (z >> 32) if column % 2 else (z & 0xFFFFFFFF)


@pytest.mark.parametrize("key", [0, 7, -3, (1 << 63) + 5, 1 << 70])
def test_equals_the_hash_in_unbounded_integers(key):
    ids = torch.tensor([0, 1, -1, 12345, 2**40 + 3, -(2**62), 2**63 - 1, -(2**63)])
    want = [
        [(reference_bits(key, token, column) & 0xFFFFFF) / 2**24 for column in range(5)]
        for token in ids.tolist()
    ]
    assert torch.equal(counter_uniform(key, ids, 5), torch.tensor(want))


def test_a_number_depends_on_key_token_and_column_only():
    ids, width = torch.randperm(97), 31
    whole = counter_uniform(3, ids, width)
    for cut in (0, 1, 40, 97):
        parts = [counter_uniform(3, part, width) for part in (ids[:cut], ids[cut:])]
        assert torch.equal(torch.cat(parts), whole)
    alone = torch.cat([counter_uniform(3, ids[row : row + 1], width) for row in range(97)])
    assert torch.equal(alone, whole)
    order = torch.randperm(97)
    assert torch.equal(counter_uniform(3, ids[order], width), whole[order])
    assert torch.equal(counter_uniform(3, ids.to(torch.int32), width), whole)
    assert torch.equal(counter_uniform(3, ids, width + 6)[:, :width], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "width"), [(0, 9), (1, 8), (2, 7), (3, 1), (8, 1), (9, 0)])
def test_columns_can_be_split(first, width, dtype):
    ids = torch.arange(11)
    for draw in (counter_uniform, counter_normal):
        whole = draw(5, ids, 9, dtype=dtype)
        part = draw(5, ids, width, first_column=first, dtype=dtype)
        assert torch.equal(part, whole[:, first : first + width])


def test_blocks_do_not_show():
    # Many blocks on one thread, other blocks on two.
    ids, width = torch.arange(1000), 301
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert sum(1 for _ in counter_blocks(1, ids, width)) > 1
            results.append((counter_uniform(1, ids, width), counter_normal(1, ids, width)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0][700:], counter_uniform(1, ids[700:], width))


def test_strided_ids_and_nothing_at_all():
    ids = torch.arange(20)
    assert torch.equal(counter_uniform(1, ids[::3], 4), counter_uniform(1, ids, 4)[::3])
    assert counter_uniform(1, ids[:0], 4).shape == (0, 4)
    assert counter_uniform(1, ids, 0).shape == (20, 0)
    assert counter_normal(1, ids[:0], 4).shape == (0, 4)


def test_fp64_begins_with_the_bits_of_fp32():
    ids = torch.arange(64)
    narrow, wide = counter_uniform(9, ids, 33), counter_uniform(9, ids, 33, dtype=torch.float64)
    assert torch.equal((wide * 2**24).floor() / 2**24, narrow.double())
    low_bits = (wide * 2**53).to(torch.int64) & (2**29 - 1)
    # About 2112^2 / 2^30 = 0.004 pairs of equal numbers are chance.
    assert low_bits.unique().numel() > low_bits.numel() - 3


def uniform_deviation(values, bins):
    """Standard deviations by which a chi-squared sum over equal bins is off its mean."""
    counts = torch.histc(values.double().flatten(), bins=bins, min=0, max=1)
    expected = values.numel() / bins
    chi = ((counts - expected) ** 2 / expected).sum().item()
    return (chi - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("key", [0, 1, 2**63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_over_everything_over_tokens_and_over_columns(key, dtype):
    u = counter_uniform(key, torch.arange(2048), 512, dtype=dtype)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(uniform_deviation(u, 1024)) < 5
    for axis in (0, 1):
        # Each mean is normal with a deviation of 1 / sqrt(12 n).
        n = u.shape[axis]
        z = (u.double().mean(axis) - 0.5) * math.sqrt(12 * n)
        assert z.abs().max() < 5.5
        assert abs(z.var().item() - 1) < 0.3


def correlation(a, b):
    """Correlation in standard deviations."""
    a, b = a.double().flatten() - 0.5, b.double().flatten() - 0.5
    return ((a * b).sum() * 12 / math.sqrt(a.numel())).item()


def test_neighbouring_tokens_columns_and_keys_are_independent():
    ids = torch.arange(1024)
    u = counter_uniform(42, ids, 512)
    pairs = {
        "tokens": (u[1:], u[:-1]),
        "columns": (u[:, 1:], u[:, :-1]),
        "lanes": (u[:, 2:], u[:, :-2]),
        "diagonal": (u[1:, 1:], u[:-1, :-1]),
        "transposed": (u[:512], u[:512].t()),
    }
    for other in (43, 41, 42 + 2**32, 42 ^ 2**63, 0):
        pairs[f"key {other}"] = (u, counter_uniform(other, ids, 512))
    for shift in (32, 48, 62):
        pairs[f"ids + 2^{shift}"] = (u, counter_uniform(42, ids + 2**shift, 512))
    for name, (a, b) in pairs.items():
        assert abs(correlation(a, b)) < 5, name
        # And together: pairs fill a 16 x 16 square evenly.
        square = ((a * 16).floor() * 16 + (b * 16).floor() + 0.5) / 256
        assert abs(uniform_deviation(square, 256)) < 6, name


@pytest.mark.parametrize("key", range(5))
def test_no_structure_repeats_a_number(key):
    # A hash that is linear in token or column repeats itself along diagonals.
    lanes = [
        block.contiguous().view(torch.int64).clone()
        for _, block in counter_blocks(key, torch.arange(2000), 2000)
    ]
    assert torch.cat(lanes).unique().numel() == 2000 * 1000
    for step in (1, 2**31, 2**32, 2**55):
        ids = torch.arange(200) * step
        bits = torch.cat([block.clone() for _, block in counter_blocks(key, ids, 100)])
        # About 20000^2 / 2^33 = 0.05 pairs of equal numbers are chance.
        assert bits.unique().numel() > bits.numel() - 4


def test_sums_over_rectangles_are_independent():
    # Token and column enter as a sum, so a weak hash would show in u(a,c) - u(a,d) - u(b,c) + ...
    u = counter_uniform(6, torch.arange(1024), 1024).double() - 0.5
    corners = [u[::2, ::2], u[::2, 1::2], u[1::2, ::2], u[1::2, 1::2]]
    product = corners[0] * corners[1] * corners[2] * corners[3]
    z = product.sum() * 12**2 / math.sqrt(product.numel())
    assert abs(z.item()) < 5
    # No two tokens, whatever their seeds differ by, have correlated rows.
    z = (u @ u.t()) * 12 / math.sqrt(u.shape[1])
    assert z.fill_diagonal_(0).abs().max() < 6.5
    assert abs(z.var().item() - 1) < 0.02


@pytest.mark.parametrize("bit", range(64))
def test_each_bit_of_a_token_id_changes_half_of_the_bits(bit):
    def bits(ids):
        return torch.cat([block.clone() for _, block in counter_blocks(8, ids, 64)])

    ids = torch.arange(512)
    flipped = bits(ids) ^ bits(ids ^ signed(1 << bit))
    for position in range(32):
        share = ((flipped >> position) & 1).double().mean().item()
        assert abs(share - 0.5) < 5.5 * 0.5 / math.sqrt(flipped.numel())


def test_keys_depend_on_every_part_and_on_the_order():
    parts = [(), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 0), (-1,), (1,), (3,)]
    keys = [counter_key(*part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key <= MASK for key in keys)
    assert counter_key(1, 2) == counter_key(1, 2)
    bits = [(counter_key(1, a) ^ counter_key(1, a + 1)).bit_count() for a in range(1000)]
    assert abs(sum(bits) / len(bits) - 32) < 5 * 4 / math.sqrt(len(bits))


def test_normal_is_normal():
    z = counter_normal(11, torch.arange(2000), 500, dtype=torch.float64)
    root = math.sqrt(z.numel())
    assert abs(z.mean().item()) * root < 5
    assert abs((z**2).mean().item() - 1) * root / math.sqrt(2) < 5
    assert abs((z**3).mean().item()) * root / math.sqrt(15) < 5
    assert abs((z**4).mean().item() - 3) * root / math.sqrt(96) < 5
    assert abs(uniform_deviation(torch.special.ndtr(z), 1000)) < 5
    assert z.abs().max() < 6.5


def test_normal_in_a_narrower_dtype_is_rounded_once():
    ids = torch.arange(300)
    wide = counter_normal(2, ids, 40, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(counter_normal(2, ids, 40, dtype=dtype), wide.to(dtype))


def test_mistakes_are_named():
    ids = torch.arange(4)
    with pytest.raises(TypeError, match=r"key must be an int, got 1\.5"):
        counter_uniform(1.5, ids, 2)
    with pytest.raises(TypeError, match="parts of a key must be an int, got '7'"):
        counter_key("7")
    with pytest.raises(ValueError, match=r"token ids must be 1-d.*\(2, 2\)"):
        counter_uniform(1, ids.view(2, 2), 2)
    with pytest.raises(TypeError, match=r"token ids must be integers, got torch\.float32"):
        counter_uniform(1, ids.float(), 2)
    with pytest.raises(ValueError, match="width=-1"):
        counter_uniform(1, ids, -1)
    with pytest.raises(TypeError, match=r"float64, not torch\.bfloat16"):
        counter_uniform(1, ids, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="floating point dtype"):
        counter_normal(1, ids, 2, dtype=torch.int32)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    ids = torch.cat([torch.arange(1000), torch.tensor([-1, 2**63 - 1, -(2**63)])])
    for dtype in (torch.float32, torch.float64):
        ours = counter_uniform(-5, ids, 77, dtype=dtype)
        assert torch.equal(counter_uniform(-5, ids.cuda(), 77, dtype=dtype).cpu(), ours)
    ours = counter_normal(-5, ids, 77, dtype=torch.float64)
    theirs = counter_normal(-5, ids.cuda(), 77, dtype=torch.float64).cpu()
    torch.testing.assert_close(theirs, ours, atol=1e-12, rtol=1e-12)


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "default_dtype", [torch.bfloat16, torch.float16, torch.float64], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_the_same_under_any_default_dtype(default_dtype, dtype):
    ids, key = torch.arange(64), counter_key(5)
    found = counter_uniform(key, ids, 33, dtype=dtype)
    normal = counter_normal(key, ids, 33, dtype=dtype)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(found, counter_uniform(key, ids, 33, dtype=dtype))
    assert torch.equal(normal, counter_normal(key, ids, 33, dtype=dtype))
    assert found.max() < 1


def test_compiled_programs_draw_the_same_numbers():
    ids = torch.arange(8)

    def drawn(seed):
        return counter_uniform(counter_key(seed), ids, 6) + 1

    compiled = torch.compile(drawn, backend="eager")
    for seed in (3, 1 << 40, 7):
        assert torch.equal(compiled(seed), drawn(seed))
