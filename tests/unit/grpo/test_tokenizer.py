"""Vocabularies."""

from __future__ import annotations

import pytest

from quiesce_grpo.errors import VocabularyError
from quiesce_grpo.tokenizer import CharacterTokenizer


def test_a_text_survives_encoding_and_decoding() -> None:
    """Decoding undoes encoding, character by character."""
    tokenizer = CharacterTokenizer("0123456789 +-=")

    tokens = tokenizer.encode("4 - 17 =")

    assert tokenizer.decode(tokens) == "4 - 17 ="
    assert len(tokens) == 8


def test_special_tokens_stand_in_no_text() -> None:
    """Padding and the end token are left out when decoding, and no character has their ids."""
    tokenizer = CharacterTokenizer("ab")

    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"
    assert {tokenizer.pad_id, tokenizer.eos_id}.isdisjoint(tokenizer.encode("ab"))
    assert tokenizer.size == 4


def test_a_character_outside_the_alphabet_is_named() -> None:
    """The error says which character of which text."""
    with pytest.raises(VocabularyError, match="character 'c' of 'abc'"):
        CharacterTokenizer("ab").encode("abc")


def test_a_token_outside_the_vocabulary_is_named() -> None:
    """The error says which token."""
    with pytest.raises(VocabularyError, match="token 9"):
        CharacterTokenizer("ab").decode([2, 9])


def test_an_alphabet_holds_each_character_once() -> None:
    """A doubled character would have two ids."""
    with pytest.raises(VocabularyError, match="given twice"):
        CharacterTokenizer("aba")


def test_every_token_of_characters_is_a_whole_one() -> None:
    """A vocabulary of characters can be cut anywhere."""
    tokenizer = CharacterTokenizer("ab€")

    assert [tokenizer.whole(tokenizer.encode("a€b")[:length]) for length in range(4)] == [0, 1, 2, 3]
