"""The cache of a batch whose rows differ in length, against each row alone."""

import pytest
import torch

from moe_train.model.kv_cache import BLOCK_POSITIONS, KeyValueCache, continued_mask


def test_views_hold_all_that_was_appended_across_blocks() -> None:
    cache, parts = KeyValueCache(), []
    for length in (3, BLOCK_POSITIONS - 3, 1, 2 * BLOCK_POSITIONS, 5):
        parts.append(torch.randn(2, 3, length, 4))
        keys, values = cache.extend(7, parts[-1], parts[-1] * 2)
        assert torch.equal(keys, torch.cat(parts, dim=2))
        assert torch.equal(values, 2 * keys)
        assert cache.num_cached == keys.shape[2]


def test_kept_rows_go_on_in_the_order_asked_for() -> None:
    cache = KeyValueCache()
    keys = torch.randn(3, 1, 4, 2)
    cache.add_positions(torch.arange(4).expand(3, 4))
    cache.extend(0, keys, keys)
    cache.keep(torch.tensor([2, 0]))
    more = torch.randn(2, 1, 1, 2)
    assert torch.equal(cache.extend(0, more, more)[0], torch.cat((keys[[2, 0]], more), dim=2))
    assert cache.add_positions(torch.full((2, 1), 4)).tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("window", [None, 1, 3])
def test_each_token_attends_to_its_own_window_and_padding_to_itself(window: int | None) -> None:
    keys = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    for length in (1, 2, 6):
        mask = continued_mask(keys[:, -length:], keys, window)
        assert mask.shape == (2, 1, length, 6)
        for b in range(2):
            for s in range(length):
                place = 6 - length + s
                near = [p for p in range(6) if window is None or place - p < window]
                real = [p for p in near if keys[b, p] >= 0 and p <= place]
                seen = mask[b, 0, s].nonzero().flatten().tolist()
                assert seen == (real if keys[b, place] >= 0 else [place])


def test_no_mask_is_made_where_plain_causal_attention_is_the_same() -> None:
    cache = KeyValueCache()
    prompt, token = torch.arange(5).expand(2, 5), torch.full((2, 1), 5)
    cache.add_positions(prompt)
    assert cache.mask(prompt, None) is None
    assert cache.mask(prompt, 4) is not None
    cache.add_positions(token)
    assert cache.mask(token, None) is None
    assert cache.mask(token, 6) is None
    assert cache.mask(token, 5) is not None
    padded = KeyValueCache()
    positions = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    padded.add_positions(positions)
    assert padded.mask(positions, None) is not None
