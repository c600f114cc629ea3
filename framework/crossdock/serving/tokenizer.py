"""Text and token ids: a ``tokenizer.json`` folder read with the ``tokenizers`` library, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import tokenizers

from crossdock.errors import CheckpointError


@attrs.frozen(kw_only=True, eq=False)
class TextTokenizer:
    """A model's tokenizer. Encoding adds the special tokens that its post-processor asks for."""

    _tokenizer: tokenizers.Tokenizer = attrs.field(alias="tokenizer")
    config: Mapping[str, Any]
    """``tokenizer_config.json``; empty when there is none."""
    special_ids: frozenset[int]
    is_byte_level: bool
    """Each token is a string of byte symbols, so bytes of tokens can be joined exactly."""
    _known_bytes: dict[int, bytes] = attrs.field(factory=dict[int, bytes], init=False, repr=False)
    """Of ids that were asked for: as many as the vocabulary has at most."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """As ``encode`` for each text; the library spreads a batch over threads."""
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        ]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id; None for an id that the vocabulary does not have."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; empty for an unknown one (models pad their vocabulary)."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level and token_id not in self.special_ids:
            return byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if token_id in self.special_ids:
            return token.encode()
        # SentencePiece decoders drop the space of a first token; behind another token it is kept.
        return token.replace("\u2581", " ").encode()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def load_tokenizer(folder: Path) -> TextTokenizer | None:
    """The tokenizer of a checkpoint folder; None when it has no ``tokenizer.json``.

    Raises:
        CheckpointError: a file is there but cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise CheckpointError(f"{path} is no tokenizer that the tokenizers library reads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    added = tokenizer.get_added_tokens_decoder()
    return TextTokenizer(
        tokenizer=tokenizer,
        config=read_tokenizer_config(folder),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        is_byte_level=isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel),
    )


def read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """``tokenizer_config.json`` of a folder, ``{}`` when absent.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a JSON {type(config).__name__}, an object is needed")
    return config


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with any other symbol stands for its own text, as the library decodes it."""
    table = _bytes_of_symbols()
    values = [table.get(symbol) for symbol in token]
    if None in values:
        return token.encode()
    return bytes(value for value in values if value is not None)


@lru_cache(maxsize=1)
def _bytes_of_symbols() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    return table | {chr(0x100 + place): value for place, value in enumerate(others)}
