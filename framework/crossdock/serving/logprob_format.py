"""Log-probabilities in the two forms of the OpenAI interface."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.serving.protocol.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
)
from crossdock.serving.tokenizer import TextTokenizer
from crossdock.types.request import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity (a token that sampling excludes)."""


@attrs.frozen(kw_only=True, eq=False)
class LogprobFormat:
    """Knows how to spell a token; without a tokenizer its id is the spelling."""

    tokenizer: TextTokenizer | None

    def token_text(self, token_id: int) -> str:
        """A token alone; bytes that are no character alone are spelled ``bytes:\\xe2\\x82``."""
        if self.tokenizer is None:
            return str(token_id)
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def completion(
        self,
        entries: Sequence[TokenLogprob | None],
        *,
        text_offset: int,
        with_top: bool,
        unscored_token: int | None = None,
    ) -> CompletionLogprobs:
        """For ``/v1/completions``; a None entry is ``unscored_token``, the first of an echoed prompt.

        Args:
            entries: the tokens in order.
            text_offset: characters of the choice's text before the first of them.
            with_top: give ``top_logprobs``, which holds the chosen token too.
            unscored_token: id for a None entry.
        """
        tokens: list[str] = []
        offsets: list[int] = []
        for entry in entries:
            token = self.token_text(entry.token_id) if entry is not None else self._unscored(unscored_token)
            offsets.append(text_offset)
            tokens.append(token)
            text_offset += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
            top_logprobs=[None if entry is None or not with_top else self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def chat(self, entries: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
        """For ``/v1/chat/completions``."""
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    token=self.token_text(entry.token_id),
                    logprob=finite(entry.logprob),
                    bytes=self._bytes(entry.token_id),
                    top_logprobs=[
                        ChatTopLogprob(token=self.token_text(token), logprob=finite(value), bytes=self._bytes(token))
                        for token, value in entry.top[:num_top]
                    ],
                )
                for entry in entries
            ]
        )

    def _unscored(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_text(token_id)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top = {self.token_text(token): finite(value) for token, value in entry.top}
        top.setdefault(self.token_text(entry.token_id), finite(entry.logprob))
        return top

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """``logprob`` as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)
