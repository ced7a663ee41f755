"""Continue a batch of prompts token by token, each token computed once.

Every rank of the layout makes the same calls; a rank's rows are those of its pipeline, all stages
of which know them. The last stage takes the tokens and tells the others. Rows that have ended leave
the batch; a rank without rows takes part with none.

    decoding = Decoding(model, tokenizer, prompts, GenerationOptions(max_new_tokens=20))
    while decoding.step():
        print(decoding.rows[0].take_text(), end="")
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from moe_train.errors import check_finite
from moe_train.generation.model_ranks import ModelRanks
from moe_train.generation.options import GenerationOptions
from moe_train.generation.sampling import next_token, seeded_generator
from moe_train.generation.text_stream import TextStream
from moe_train.model import KeyValueCache
from moe_train.tokenization import TextTokenizer

FinishReason = Literal["", "end", "stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens to continue, and the number of the text among those of the same prompt."""

    ids: tuple[int, ...]
    sequence_index: int = 0


@dataclass(slots=True, kw_only=True)
class Row:
    """One text as it grows; filled in on the last stage.

    Attributes:
        ids: tokens of the prompt and those that followed, an end token included.
        finish_reason: "end" (an end token), "stop" (a stop string), "length" (as many tokens as
            asked for, or as the model has positions), "interrupted", or "" while it goes on.
    """

    ids: list[int]
    num_prompt_tokens: int
    stream: TextStream
    generator: torch.Generator
    finish_reason: FinishReason = ""
    _fresh: list[str] = field(default_factory=list)

    def add(self, token: int, end_token_ids: Collection[int], max_tokens: int) -> None:
        """Take the next token; the row ends where its text does."""
        self.ids.append(token)
        if token in end_token_ids:
            self.finish_reason = "end"
        else:
            self._fresh.append(self.stream.push(token))
            if self.stream.stopped:
                self.finish_reason = "stop"
            elif len(self.ids) >= max_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            self._fresh.append(self.stream.finish())

    def interrupt(self) -> None:
        """End here."""
        self.finish_reason = self.finish_reason or "interrupted"
        self._fresh.append(self.stream.finish())

    def take_text(self) -> str:
        """The text to show since the last call."""
        text, self._fresh = "".join(self._fresh), []
        return text


@final
class Decoding:
    """A batch on its way; see the module's docstring.

    Args:
        model: all ranks' parts.
        tokenizer: of the checkpoint.
        prompts: the rows of this rank, the same on each stage of its pipeline; may be none.
        options: the same on every rank.

    Attributes:
        rows: the texts.
        interrupted: a rank was asked to end.
    """

    def __init__(
        self,
        model: ModelRanks,
        tokenizer: TextTokenizer,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
    ) -> None:
        self._model, self._options = model, options
        ends = (*model.config.eos_token_ids, *tokenizer.eos_token_ids)
        self._end_token_ids = frozenset(ends)
        self._cache = KeyValueCache()
        self._input_ids_BS, self._position_ids_BS = left_padded([p.ids for p in prompts])
        self.rows = [
            Row(
                ids=list(prompt.ids),
                num_prompt_tokens=len(prompt.ids),
                stream=TextStream(tokenizer, prompt.ids, options.stop),
                generator=seeded_generator(options.seed, prompt.sequence_index),
            )
            for prompt in prompts
        ]
        self._active = list(self.rows)
        self.interrupted = False

    def step(self, *, stop: bool = False) -> bool:
        """Add a token to each row that goes on. Collective.

        Args:
            stop: this rank was asked to end; then all do, after this token.

        Returns:
            Whether any row of any rank goes on.
        """
        hidden_BSd = self._model.forward(self._input_ids_BS, self._position_ids_BS, self._cache)
        taken_B2 = None if hidden_BSd is None else self._take_tokens(hidden_BSd)
        told_B2 = self._model.tell_stages(taken_B2)
        going = (told_B2[:, 1] == 0).nonzero().flatten()
        self._active = [self._active[int(row)] for row in going]
        if len(going) < len(told_B2):
            self._cache.keep(going.to(self._model.device))
        self._input_ids_BS = told_B2[going, :1]
        self._position_ids_BS = self._position_ids_BS[going, -1:] + 1
        total, stops = self._model.sum_over_ranks([len(going), stop])
        if stops:
            self.interrupted = True
            for row in self._active:
                row.interrupt()
        return total > 0 and not stops

    def _take_tokens(self, hidden_BSd: Tensor) -> Tensor:
        """The next token of each row and whether it ends there, int64 [B, 2]."""
        if not self._active:
            return torch.zeros(0, 2, dtype=torch.int64)
        with torch.no_grad():
            logits_BV = self._model.stage.logits(hidden_BSd[:, -1:])[:, 0].float()
        room = self._model.config.max_position_embeddings
        for row, token in zip(self._active, self._choose(logits_BV), strict=True):
            limit = min(row.num_prompt_tokens + self._options.max_new_tokens, room)
            row.add(token, self._end_token_ids, limit)
        told = [(row.ids[-1], bool(row.finish_reason)) for row in self._active]
        return torch.tensor(told, dtype=torch.int64)

    def _choose(self, logits_BV: Tensor) -> list[int]:
        options = self._options
        if options.temperature == 0 and options.repetition_penalty == 1:
            values_B, tokens_B = logits_BV.max(dim=-1)
            check_finite(bool(torch.isfinite(values_B).all()))
            return [int(token) for token in tokens_B.tolist()]
        rows = zip(logits_BV.cpu(), self._active, strict=True)
        return [next_token(logits_V, row.ids, options, row.generator) for logits_V, row in rows]


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and positions [B, S] of rows that end together; padding is token 0 at position -1."""
    length = max(map(len, rows), default=1)
    input_ids_BS = torch.zeros(len(rows), length, dtype=torch.int64)
    position_ids_BS = torch.full((len(rows), length), -1)
    for b, ids in enumerate(rows):
        input_ids_BS[b, length - len(ids) :] = torch.tensor(ids)
        position_ids_BS[b, length - len(ids) :] = torch.arange(len(ids))
    return input_ids_BS, position_ids_BS
