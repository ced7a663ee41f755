"""Whether the sizes of a decoder fit a layout, with the nearest that do; pure.

check_shared_out("tp", 2, "intermediate_size", 33, num_token_ranks=4)      # ValueError
"""

import math
from collections.abc import Mapping, Sequence

from moe_train.errors import TrainValueError


def check_sharing(place: str, *, cp: int, tp: int, num_token_ranks: int) -> None:
    """Refuse a cp x tp that does not divide the dp x ep ranks of a stage (ValueError).

    Args:
        place: what stands before the names of the keys.
    """
    if num_token_ranks % (cp * tp):
        sizes = {"cp": cp, "tp": tp}
        told = place + " * ".join(f"{n}={size}" for n, size in sizes.items() if size > 1)
        raise TrainValueError(
            f"{told} ranks share each sample, but the dp * ep = {num_token_ranks} ranks of a "
            f"stage are no multiple of it; choose among {divisors(num_token_ranks)}"
        )


def check_shared_out(tp: int, name: str, size: int, *, num_token_ranks: int) -> None:
    """Refuse heads or a width of the model that tp ranks cannot share out evenly (ValueError).

    Args:
        num_token_ranks: the ranks of a stage that cp leaves; tp divides them.
    """
    if size % tp:
        fitting = divisors(math.gcd(size, num_token_ranks))
        raise TrainValueError(
            f"parallel.tp={tp} ranks cannot share out {name}={size} evenly; with these dp, ep and "
            f"cp choose among {fitting}"
        )


def check_vocabulary(tp: int, vocab_size: int, *, num_token_ranks: int) -> None:
    """Refuse a vocabulary that leaves some of tp ranks without a row (ValueError).

    Args:
        num_token_ranks: the ranks of a stage that cp leaves; tp divides them.
    """
    if vocab_size < tp:
        fitting = max(d for d in range(1, vocab_size + 1) if num_token_ranks % d == 0)
        raise TrainValueError(
            f"parallel.tp={tp} ranks share out vocab_size={vocab_size}, at least one row each; the "
            f"most that works here is parallel.tp={fitting}"
        )


def check_experts_shared_out(etp: int, *, dp: int, place: str = "parallel.") -> None:
    """Refuse an etp that does not divide the dp ranks with the same experts (ValueError).

    Args:
        place: what stands before the names of the keys.
    """
    if dp % etp:
        raise TrainValueError(
            f"{place}etp={etp} ranks share each expert, but the dp={dp} ranks that have the same "
            f"experts are no multiple of it; choose among {divisors(dp)}"
        )


def check_expert_width(etp: int, width: int, *, has_bias: bool, dp: int) -> None:
    """Refuse experts that etp ranks cannot share out evenly, or whose biases they cannot.

    Raises:
        ValueError: with the nearest that works.
    """
    if etp > 1 and has_bias:
        raise TrainValueError(
            f"parallel.etp={etp} ranks share each expert, but those of this family (gpt_oss) have "
            "biases, which are whole on one rank; use parallel.ep, which shares out whole experts"
        )
    if width % etp:
        raise TrainValueError(
            f"parallel.etp={etp} ranks cannot share out moe_intermediate_size={width} evenly; with "
            f"this dp choose among {divisors(math.gcd(width, dp))}"
        )


def check_heads(num_heads: int, *, cp: int, tp: int, ranks: int, all_to_all: bool) -> None:
    """Refuse heads that tp, or cp ranks that exchange them, cannot share out (ValueError).

    Args:
        ranks: of a stage.
        all_to_all: cp ranks exchange heads for positions.
    """
    check_shared_out(tp, "num_attention_heads", num_heads, num_token_ranks=ranks // cp)
    each = num_heads // tp
    if cp > each and all_to_all:
        fitting = [n for n in range(1, each + 1) if ranks // tp % n == 0]
        of_rank = f" / parallel.tp={tp}" if tp > 1 else ""
        raise TrainValueError(
            f"parallel.cp={cp} ranks share out num_attention_heads={num_heads}{of_rank}, "
            f"at least one each; the most that works here is parallel.cp={fitting[-1]}, or set "
            'parallel.cp_attention="ring"'
        )


def check_experts(
    num_experts: int, *, ep: int, texts: Sequence[str], parts: Mapping[int | None, tuple[int, ...]]
) -> None:
    """Refuse experts that ep ranks cannot share out (ValueError).

    Args:
        texts: entries of `parallel.expert_parts`.
        parts: what each of them says.
    """
    for text, given in zip(texts, parts.values(), strict=True):
        if sum(given) != num_experts:
            raise TrainValueError(
                f"parallel.expert_parts: {text!r} are {sum(given)} experts, but "
                f"num_experts={num_experts}; each expert is on one rank along ep"
            )
    if num_experts % ep and None not in parts:
        raise TrainValueError(
            f"parallel.ep={ep} ranks cannot share num_experts={num_experts} evenly; "
            f"choose ep among {divisors(num_experts)}, or in training give uneven parts by "
            "parallel.expert_parts"
        )


def check_layers(num_layers: int, *, pp: int, per_rank: int, is_equal: bool) -> None:
    """Refuse layers that stages cannot share out (ValueError).

    Args:
        per_rank: stages on each rank.
        is_equal: every stage has as many layers.
    """
    each = f" x {per_rank} on a rank" if per_rank > 1 else ""
    if not is_equal and num_layers < pp * per_rank:
        raise TrainValueError(
            f"num_hidden_layers={num_layers} are fewer than parallel.pp={pp}{each} "
            "stages; choose fewer"
        )
    if is_equal and num_layers % (pp * per_rank):
        each_rank = num_layers // per_rank if num_layers % per_rank == 0 else 0
        among = f"choose pp among {divisors(each_rank)}" if each_rank else "have fewer of them"
        raise TrainValueError(
            f"num_hidden_layers={num_layers} is not divisible by parallel.pp={pp}{each} "
            f'stages; {among}, or in training set parallel.layer_split="cost"'
        )


def divisors(number: int) -> str:
    """All of them, as in "1, 2, 4"."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
