"""The text of tokens that come one at a time: whole characters, right spaces, exact stop strings.

A token is decoded together with those before it, since a character may be cut into several tokens
and a space belongs to the token before or behind it. What may be the beginning of a stop string is
held back until it is known not to be.

    stream = TextStream(tokenizer, prompt_ids, stop=("\\n\\n",))
    shown = stream.push(17) + stream.push(4) + stream.finish()
    # shown == stream.text
"""

from collections.abc import Sequence
from typing import final

from moe_train.tokenization import TextTokenizer

_INCOMPLETE = "\ufffd"  # what bytes that are no whole character are decoded to
_CONTEXT_TOKENS = 8


@final
class TextStream:
    """The continuation of one prompt.

    Attributes:
        stopped: a stop string was found; the text ends before it.

    Args:
        tokenizer: decodes; special tokens are left out of the text.
        prompt_ids: the tokens that are continued.
        stop: strings that end the text.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = self._context(list(prompt_ids))
        self._prefix, self._read = 0, len(self._ids)  # what was decoded last, and up to where
        self._stable = ""  # decoded for good
        self._pending = ""  # decoded, but the last character may change
        self._shown = 0

    @property
    def text(self) -> str:
        """All text so far, what is held back included."""
        return self._stable + self._pending

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be shown now, in whole characters."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        fresh = self._decode(self._ids[self._prefix :])[len(before) :]
        searched = max(0, len(self._stable) - max(map(len, self._stop), default=0))
        if fresh.endswith(_INCOMPLETE):
            self._pending = fresh
        else:
            self._stable, self._pending = self._stable + fresh, ""
            if fresh:
                self._prefix, self._read = self._read, len(self._ids)
        self._look_for_stop(searched)
        return self._show(len(self._stable) - self._held_back())

    def finish(self) -> str:
        """The rest, when no token follows."""
        self._stable, self._pending = self.text, ""
        return self._show(len(self._stable))

    def _context(self, ids: list[int]) -> list[int]:
        """The prompt's last tokens: some that show, beginning with a whole character."""
        start = max(0, len(ids) - _CONTEXT_TOKENS)
        while start:
            text = self._decode(ids[start:])
            if text and not text.startswith(_INCOMPLETE):
                break
            start -= 1
        return ids[start:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _look_for_stop(self, start: int) -> None:
        found = [self.text.find(stop, start) for stop in self._stop]
        places = [place for place in found if place >= 0]
        if places:
            self.stopped = True
            self._stable, self._pending = self.text[: min(places)], ""

    def _held_back(self) -> int:
        """How many characters at the end may begin a stop string."""
        if self.stopped:
            return 0
        lengths = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        ends = (n for n in lengths if any(s.startswith(self._stable[-n:]) for s in self._stop))
        return next((n for n in ends if n <= len(self._stable)), 0)

    def _show(self, end: int) -> str:
        shown, self._shown = self._stable[self._shown : end], max(self._shown, end)
        return shown
