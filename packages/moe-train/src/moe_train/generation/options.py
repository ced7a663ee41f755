"""How a text is continued: how far, which token is taken, and where it ends.

GenerationOptions(max_new_tokens=200, temperature=0.7, top_p=0.9, stop=("\\n\\n",))
"""

import math
from dataclasses import dataclass, fields

from moe_train.errors import TrainTypeError, TrainValueError

_LIMITS: dict[str, tuple[float, float, str]] = {
    "max_new_tokens": (1, math.inf, "a whole number of at least 1"),
    "temperature": (1e-15, math.inf, "0, the most probable token each time, or at least 1e-15"),
    "top_k": (0, math.inf, "a whole number of at least 0; 0 keeps all tokens"),
    "top_p": (0, 1, "above 0 and at most 1; 1 keeps all tokens"),
    "min_p": (0, 1, "from 0 to 1; 0 keeps all tokens"),
    "repetition_penalty": (1e-15, 1e15, "from 1e-15 to 1e15; 1 changes nothing"),
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2**63 - 1"),
    "num_return_sequences": (1, math.inf, "a whole number of at least 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Names, meanings and order are those of transformers' `GenerationConfig`.

    The repetition penalty always acts; temperature, `top_k`, `top_p` and `min_p`, in this order,
    where tokens are drawn. A text depends on its prompt, the options and the seed alone, not on
    the texts beside it or on the layout.

    Attributes:
        max_new_tokens: tokens to add at most.
        temperature: the logits are divided by it; 0 takes the most probable token each time.
        top_k: draw among this many most probable tokens; 0: all.
        top_p: draw among the most probable tokens that together have this probability.
        min_p: draw among tokens with this fraction of the most probable token's probability.
        repetition_penalty: tokens that are there already become less probable above 1.
        seed: of the draws.
        stop: strings that end a text; it is cut before them.
        num_return_sequences: texts of each prompt; with temperature 0 they are equal.

    Raises:
        TypeError, ValueError: names the option, what was given and what is expected.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        whole = {item.name for item in fields(self) if item.type is int}
        for name, (low, high, text) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(
                value, int if name in whole else int | float
            ):
                raise TrainTypeError(f"{name}={value!r}; expected {text}")
            is_in = low <= value <= high or (name == "temperature" and value == 0)
            if not is_in or value == math.inf or (name == "top_p" and value == 0):
                raise TrainValueError(f"{name}={value!r}; expected {text}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise TrainValueError(f"stop={self.stop!r}; expected strings that are not empty")
        object.__setattr__(self, "stop", tuple(self.stop))  # JSON and argparse give lists
