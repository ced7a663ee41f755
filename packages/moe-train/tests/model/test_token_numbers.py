import torch

from moe_train.model.token_numbers import TokenNumbers


def numbers(layout: tuple[int, int, int], step: int) -> torch.Tensor:
    """Of 12 rows of 5 places, as (microbatches, sample ranks, rows of each) give them together."""
    microbatches, ranks, rows = layout
    counters = [TokenNumbers(seed=0, sample_rank=r, num_sample_ranks=ranks) for r in range(ranks)]
    parts = []
    for counter in counters:
        counter.begin_step(step)
    for _ in range(microbatches):
        parts += [
            counter.next_microbatch(torch.zeros(rows, 5)).token_ids_BS for counter in counters
        ]
    return torch.cat(parts)


def test_a_tokens_number_is_the_same_in_every_layout_and_another_in_every_step() -> None:
    one = numbers((1, 1, 12), 3)
    assert one.flatten().tolist() == list(range(int(one[0, 0]), int(one[0, 0]) + 60))
    for layout in ((2, 1, 6), (1, 4, 3), (3, 2, 2)):
        assert torch.equal(numbers(layout, 3), one)
    assert int(numbers((1, 1, 12), 4).min()) > int(one.max())
