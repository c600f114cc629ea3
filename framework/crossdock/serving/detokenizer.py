"""Token ids to text as they come: a piece never ends inside a character, and all pieces joined are the whole text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import attrs

from crossdock.serving.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 8
"""A character has at most four bytes; more pending tokens than this are bytes that never become one."""


class Detokenizer(Protocol):
    """Turns one sequence's new ids into text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these ids complete; bytes of an unfinished character are kept back."""
        ...

    def flush(self) -> str:
        """The unfinished tail, once, with U+FFFD for what is no character."""
        ...


@attrs.define(kw_only=True)
class ByteLevelDetokenizer:
    """For byte-level vocabularies: joins the bytes of tokens, so each token costs the same however long the text is."""

    tokenizer: TextTokenizer
    skip_special_tokens: bool = True
    _decoder: codecs.IncrementalDecoder = attrs.field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def feed(self, token_ids: Sequence[int]) -> str:
        skipped = self.tokenizer.special_ids if self.skip_special_tokens else ()
        new_bytes = b"".join(self.tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return self._decoder.decode(new_bytes)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@attrs.define(kw_only=True)
class WindowDetokenizer:
    """For any decoder: decodes a short window twice and gives the difference.

    ``_ids[_shown:]`` is not shown yet; ``_ids[_start:_shown]`` is decoded with it because decoders look at the token
    before (SentencePiece drops the space of the first token it sees).
    """

    tokenizer: TextTokenizer
    skip_special_tokens: bool = True
    _ids: list[int] = attrs.Factory(list)
    _start: int = 0
    _shown: int = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = [self._feed_one(token_id) for token_id in token_ids]
        return "".join(pieces)

    def flush(self) -> str:
        return self._show()

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        is_unfinished = text.endswith(REPLACEMENT) and len(self._ids) - self._shown < MAX_PENDING_TOKENS
        return "" if is_unfinished else self._show()

    def _show(self) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(self._ids) > self._shown and len(text) > len(before):
            self._start, self._shown = self._shown, len(self._ids)
            del self._ids[: self._start]
            self._shown -= self._start
            self._start = 0
            return text[len(before) :]
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)


@attrs.define(kw_only=True)
class NoDetokenizer:
    """For a model folder without a tokenizer: ids go out as ids, text is empty."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make_detokenizer(tokenizer: TextTokenizer | None, *, skip_special_tokens: bool = True) -> Detokenizer:
    """The detokenizer of one sequence."""
    if tokenizer is None:
        return NoDetokenizer()
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer=tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer=tokenizer, skip_special_tokens=skip_special_tokens)
