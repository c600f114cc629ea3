"""Incremental text equals the text of all ids at once, and no piece ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from crossdock.serving.detokenizer import REPLACEMENT, ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer
from crossdock.serving.tokenizer import TextTokenizer, load_tokenizer
from crossdock.testing.text_model import write_text_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    tokenizer = load_tokenizer(write_text_model(tmp_path_factory.mktemp("t") / "m"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A SentencePiece-like vocabulary: word pieces with a visible space, and byte tokens for everything else."""
    pieces = [
        "<unk>",
        *(f"<0x{value:02X}>" for value in range(256)),
        "\u2581the",
        "\u2581fox",
        "\u2581",
        "es",
        "\u00e9",
    ]
    inner = tokenizers.Tokenizer(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder: Path = write_text_model(tmp_path_factory.mktemp("t") / "s", tokenizer=inner)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert not tokenizer.is_byte_level
    return tokenizer


def pieces_of(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [*(detokenizer.feed([token]) for token in ids), detokenizer.flush()]


@given(text=st.text(max_size=40))
def test_pieces_of_real_text_never_hold_half_a_character(byte_level: TextTokenizer, text: str) -> None:
    pieces = pieces_of(byte_level, byte_level.encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 511), max_size=40))
def test_any_ids_give_what_the_library_decodes_at_once(byte_level: TextTokenizer, ids: list[int]) -> None:
    """Broken UTF-8 included; ids beyond the vocabulary are padding of the model's head and give nothing."""
    known = [token for token in ids if byte_level.token(token) is not None]
    assert "".join(pieces_of(byte_level, ids)) == byte_level.decode(known)


def test_the_window_form_equals_the_byte_form_on_real_text(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode("the \U0001f600 fox \u6f22\u5b57 \u00e9t\u00e9 runs")
    window = WindowDetokenizer(tokenizer=byte_level)
    by_bytes = ByteLevelDetokenizer(tokenizer=byte_level)
    for token in ids:
        assert window.feed([token]) == by_bytes.feed([token])


@pytest.mark.parametrize(
    "text", [" the fox", " the \u00e9 fox", " \U0001f600 the \u6f22 fox", "\U0001f469\u200d\U0001f680", " fox es"]
)
def test_byte_fallback_vocabularies_keep_spaces_and_characters(byte_fallback: TextTokenizer, text: str) -> None:
    by_piece = {byte_fallback.token(token): token for token in range(byte_fallback.vocab_size)}
    words = {" the": "\u2581the", " fox": "\u2581fox", " ": "\u2581"}
    ids: list[int] = []
    rest = text
    while rest:
        word = next((word for word in words if rest.startswith(word)), None)
        if word is not None:
            ids.append(by_piece[words[word]])
            rest = rest[len(word) :]
        else:
            ids.extend(by_piece[f"<0x{value:02X}>"] for value in rest[0].encode())
            rest = rest[1:]
    pieces = pieces_of(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert "".join(pieces) == text.removeprefix(" ")
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_an_unfinished_tail_is_given_once(byte_level: TextTokenizer, byte_fallback: TextTokenizer) -> None:
    for tokenizer, ids in (
        (byte_level, [_byte_token(byte_level, value) for value in "\u6f22".encode()[:2]]),
        (byte_fallback, [1 + value for value in "\u6f22".encode()[:2]]),
    ):
        detokenizer = make_detokenizer(tokenizer)
        assert "".join(detokenizer.feed([token]) for token in ids) == ""
        tail = detokenizer.flush()
        assert set(tail) == {REPLACEMENT}
        assert tail == tokenizer.decode(ids)
        assert detokenizer.flush() == ""


def _byte_token(tokenizer: TextTokenizer, value: int) -> int:
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([value]))


def test_special_tokens_are_no_text_unless_asked_for(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode("the<|end|>fox")
    assert "".join(pieces_of(byte_level, ids)) == "thefox"
    shown = make_detokenizer(byte_level, skip_special_tokens=False)
    assert shown.feed(ids) == "the<|end|>fox"
