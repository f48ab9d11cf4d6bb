"""Vocabularies: one token a character for a model built here, or the tokenizer that came with a loaded model.

Rule: ``decode`` leaves out special tokens, so that a decoded completion is the answer and nothing else; what
a vocabulary cannot write is an error that names it; ``whole`` never counts a token whose character still
lacks bytes. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, cast

from quiesce_grpo.config import ModelConfig
from quiesce_grpo.errors import VocabularyError

__all__ = ["CharacterTokenizer", "PretrainedTokenizer", "Tokenizer", "build_tokenizer"]

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or none yet."""

_MOST_HELD: Final = 8
"""A character has four bytes at most, each in a token of its own; a few more tokens cost little."""


class Tokenizer(Protocol):
    """What the reference run needs of a tokenizer."""

    @property
    def size(self) -> int:
        """Number of token ids, special ones included."""

    @property
    def pad_id(self) -> int:
        """Token that fills batches up; never attended to."""

    @property
    def eos_id(self) -> int:
        """Token that ends a completion."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens that a policy continues from."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain text, without special ones."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, leaving out special ones."""

    def whole(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first on, can be cut off without splitting a character.

        Args:
            tokens: What follows such a place, or the beginning.
        """


class CharacterTokenizer:
    """One token a character: id 0 pads, id 1 ends, the alphabet follows in its order.

    Args:
        alphabet: The characters, each once.

    Raises:
        VocabularyError: If a character stands twice.
    """

    PAD_ID = 0
    EOS_ID = 1
    _SPECIAL = 2

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self._ids = {character: self._SPECIAL + place for place, character in enumerate(alphabet)}
        if len(self._ids) != len(alphabet):
            raise VocabularyError("a character given twice", repr(alphabet))

    @property
    def size(self) -> int:
        """Number of token ids, both special ones included."""
        return len(self.alphabet) + self._SPECIAL

    @property
    def pad_id(self) -> int:
        """Token that fills batches up."""
        return self.PAD_ID

    @property
    def eos_id(self) -> int:
        """Token that ends a completion."""
        return self.EOS_ID

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, the same as :meth:`encode`."""
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return one token for each character.

        Raises:
            VocabularyError: If a character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise VocabularyError(f"character {error.args[0]!r} of {text!r}", repr(self.alphabet)) from None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the characters, leaving out the special tokens.

        Raises:
            VocabularyError: If a token id is not of this vocabulary.
        """
        characters = []
        for token in tokens:
            if not 0 <= token < self.size:
                raise VocabularyError(f"token {token}", repr(self.alphabet))
            if token >= self._SPECIAL:
                characters.append(self.alphabet[token - self._SPECIAL])
        return "".join(characters)

    def whole(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens: each is a character."""
        return len(tokens)


class PretrainedTokenizer:
    """The tokenizer of a loaded model.

    Args:
        path: A folder or hub name.
        chat_template: Wrap prompts in the tokenizer's chat template, as one user message.

    Raises:
        VocabularyError: If it has no end-of-sequence token, or no chat template where one is wanted.
    """

    def __init__(self, path: str, *, chat_template: bool = False) -> None:
        from transformers import AutoTokenizer

        self._inner: Any = AutoTokenizer.from_pretrained(path)
        self._chat_template = chat_template
        if self._inner.eos_token_id is None:
            raise VocabularyError("an end-of-sequence token", path)
        if chat_template and not self._inner.chat_template:
            raise VocabularyError("a chat template", path)

    @property
    def size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._inner)

    @property
    def pad_id(self) -> int:
        """Token that fills batches up: the tokenizer's own, or its end token (it is masked either way)."""
        return int(self._inner.eos_token_id if self._inner.pad_token_id is None else self._inner.pad_token_id)

    @property
    def eos_id(self) -> int:
        """Token that ends a completion."""
        return int(self._inner.eos_token_id)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens that a policy continues from, with what the tokenizer puts before a prompt."""
        if not self._chat_template:
            return cast("list[int]", self._inner(text)["input_ids"])
        message = self._inner.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return self.encode(message)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain text, without special ones."""
        return cast("list[int]", self._inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, leaving out special ones."""
        listed: Sequence[int] = list(tokens)
        return cast("str", self._inner.decode(listed, skip_special_tokens=True))

    def whole(self, tokens: Sequence[int]) -> int:
        """Return how many tokens end with a complete character.

        Tokens of bytes write a character in up to four pieces, and a decoder shows a replacement character for
        those that are there. So the longest beginning whose text does not end with one is taken. Bytes that
        are no text at all are held back: nothing proves that the next token does not complete them.
        """
        for count in range(len(tokens), max(len(tokens) - _MOST_HELD, 0), -1):
            if not self.decode(tokens[:count]).endswith(_INCOMPLETE):
                return count
        return 0


def build_tokenizer(config: ModelConfig) -> Tokenizer:
    """Return the tokenizer that belongs to a model configuration."""
    if config.path is None:
        return CharacterTokenizer(config.alphabet)
    return PretrainedTokenizer(config.path, chat_template=config.chat_template)
