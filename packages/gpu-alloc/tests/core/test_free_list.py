import random
from itertools import pairwise

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.core.free_list import ADDRESS_MASK, FreeList, bin_index


def _block(ptr, size):
    chunk = Chunk(ptr=ptr, size=size, pool_index=0, pre_allocated=False)
    return Block(ptr, size, chunk, None)


def test_bins_rise_with_size_and_stay_narrow():
    sizes = sorted({*range(1, 5000), *(1 << n for n in range(48)), *(3 << n for n in range(46))})
    bins = [bin_index(size) for size in sizes]
    assert bins == sorted(bins)
    for before, after in pairwise(sizes):
        if bin_index(before) == bin_index(after):
            assert after - before <= before / 32


def test_every_find_is_the_smallest_fit_at_the_lowest_address():
    """Against a linear scan, with sizes that share bins and addresses above 2**47."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    free = FreeList()
    model: list[Block] = []
    next_ptr = 1 << 47
    for step in range(4000):
        size = rng.choice((512, 1024, 1 << 20, (1 << 20) + 512, rng.randrange(1, 1 << 24)))
        action = rng.random()
        if action < 0.5 or not model:
            block = _block(next_ptr, size)
            next_ptr += rng.choice((size, 2 * size + 512))
            free.add(block.ptr, block.size, block)
            model.append(block)
        elif action < 0.65:
            block = model.pop(rng.randrange(len(model)))
            assert free.remove(block.ptr, block.size) is block
        else:
            fits = [b for b in model if b.size >= size]
            best = min(fits, key=lambda b: (b.size, b.ptr), default=None)
            key = free.find(size)
            found = free.blocks[key & ADDRESS_MASK] if key else None
            assert found is best, f"seed {seed}, step {step}, size {size}"
            if best is not None:
                model.remove(best)
                if rng.random() < 0.5:
                    now = _block(best.ptr, rng.choice((512, best.size, best.size + 512)))
                    free.resize(best.ptr, best.size, now.size)
                    free.blocks[best.ptr] = now
                    model.append(now)
                else:
                    free.remove(best.ptr, best.size)
        assert len(free) == len(model)
        assert free.total_bytes == sum(b.size for b in model)
        assert free.largest_bytes() == max((b.size for b in model), default=0), f"seed {seed}"
    assert sorted(free.entries()) == sorted((b.ptr, b.size) for b in model), f"seed {seed}"


def test_empty_list_has_nothing():
    free = FreeList()
    assert free.find(1) == 0
    assert free.largest_bytes() == 0
    assert free.entries() == ()
