"""A model and a tokenizer from a folder, as somebody brings their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Regex
from tokenizers import Tokenizer as Vocabulary
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from quiesce_grpo.config import ModelConfig
from quiesce_grpo.errors import VocabularyError
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.sampling import SamplePrompt, sample
from quiesce_grpo.tokenizer import CharacterTokenizer, PretrainedTokenizer, Tokenizer, build_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def folder(tmp_path: Path, policy: Policy) -> Path:
    """A folder with a small model and a character-level tokenizer, as transformers saves them."""
    characters = ["[pad]", "[eos]", *"0123456789 +-="]
    pad, end = characters[:2]
    vocabulary = Vocabulary(WordLevel({text: place for place, text in enumerate(characters)}, unk_token=pad))
    vocabulary.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token=pad, eos_token=end).save_pretrained(
        tmp_path
    )
    policy.model.save_pretrained(tmp_path)  # type: ignore[operator] # a transformers model, which is not followed
    return tmp_path


def test_a_loaded_model_is_the_saved_one(folder: Path, policy: Policy) -> None:
    """Same weights, its own tokenizer's special tokens, and it samples."""
    config = ModelConfig(path=str(folder), device="cpu")
    tokenizer = build_tokenizer(config)

    loaded = build_policy(config, tokenizer, seed=0)

    assert all(torch.equal(value, loaded.weights()[name]) for name, value in policy.weights().items())
    assert (loaded.pad_id, loaded.eos_id) == (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    completions = sample(
        loaded,
        [SamplePrompt(tokenizer.encode_prompt("1 + 2 ="), ["a", "b"])],
        max_new_tokens=3,
        temperature=1.0,
        version=lambda: 0,
    )
    assert completions is not None
    assert len(completions[0]) == 2


def test_a_loaded_tokenizer_speaks_like_any_other(folder: Path) -> None:
    """Encoding and decoding agree with the vocabulary that the folder was made from."""
    loaded: Tokenizer = build_tokenizer(ModelConfig(path=str(folder), device="cpu"))
    own = CharacterTokenizer("0123456789 +-=")

    assert loaded.size >= own.size
    assert loaded.encode("4-17=") == loaded.encode_prompt("4-17=") == own.encode("4-17=")
    assert loaded.decode([*own.encode("17"), loaded.eos_id, loaded.pad_id]).replace(" ", "") == "17"


def test_a_chat_template_wraps_the_prompt_and_nothing_else(folder: Path) -> None:
    """One user message, then the start of the answer."""
    saved = PreTrainedTokenizerFast.from_pretrained(folder)
    saved.chat_template = TEMPLATE.replace("<", "+").replace(">", "-")
    saved.save_pretrained(folder)

    tokenizer = build_tokenizer(ModelConfig(path=str(folder), device="cpu", chat_template=True))

    assert tokenizer.encode_prompt("12") == tokenizer.encode("+12-=")
    assert tokenizer.encode("12") == CharacterTokenizer("0123456789 +-=").encode("12")


def test_a_missing_chat_template_is_named(folder: Path) -> None:
    """Asked for and not there is an error, not a bare prompt."""
    with pytest.raises(VocabularyError, match="a chat template"):
        build_tokenizer(ModelConfig(path=str(folder), device="cpu", chat_template=True))


def test_a_missing_end_token_is_named(folder: Path) -> None:
    """Without one no completion would end."""
    saved = PreTrainedTokenizerFast.from_pretrained(folder)
    saved.eos_token = None
    saved.save_pretrained(folder)

    with pytest.raises(VocabularyError, match="an end-of-sequence token"):
        build_tokenizer(ModelConfig(path=str(folder), device="cpu"))


# ------------------------------------------------------------------------------------------- tokens of bytes


@pytest.fixture
def bytes_tokenizer(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose tokens are bytes, and two that hold pieces of characters, loaded like any other."""
    alphabet = sorted(ByteLevel.alphabet())
    letters = {letter: place for place, letter in enumerate(alphabet)}
    raw = ByteLevel(add_prefix_space=False, use_regex=False)
    # The euro sign is three bytes; one token holds the first two of them, another a blank and the first.
    euro = raw.pre_tokenize_str("€")[0][0]
    blank = raw.pre_tokenize_str(" ")[0][0]
    merges = [(euro[0], euro[1]), (blank, euro[0])]
    for first, second in merges:
        letters[first + second] = len(letters)
    end = "[eos]"
    letters[end] = len(letters)
    vocabulary = Vocabulary(BPE(letters, merges))
    vocabulary.pre_tokenizer = raw
    vocabulary.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token=end).save_pretrained(tmp_path)
    return PretrainedTokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["abc", "é", "5 €", "a€b", "🙂", "x🙂€é", "  €€"])
def test_no_cut_splits_a_character(bytes_tokenizer: Tokenizer, text: str) -> None:
    """Wherever the tokens end so far, those that count are whole characters, and no more than needed are held back."""
    tokens = bytes_tokenizer.encode(text)
    assert bytes_tokenizer.decode(tokens) == text
    complete = {0}
    for length in range(1, len(tokens) + 1):
        if text.startswith(bytes_tokenizer.decode(tokens[:length])):
            complete.add(length)

    for length in range(len(tokens) + 1):
        whole = bytes_tokenizer.whole(tokens[:length])

        assert whole == max(place for place in complete if place <= length)


def test_a_cut_counts_from_the_cut_before_it(bytes_tokenizer: Tokenizer) -> None:
    """What was held back comes with the next piece, so that the pieces together are the text."""
    tokens = bytes_tokenizer.encode("naïve 🙂 5 €!")
    pieces, start = [], 0
    for stop in range(2, len(tokens) + 2, 2):
        count = bytes_tokenizer.whole(tokens[start : min(stop, len(tokens))])
        pieces.append(bytes_tokenizer.decode(tokens[start : start + count]))
        start += count

    assert start == len(tokens)
    assert "".join(pieces) == "naïve 🙂 5 €!"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_bytes_that_are_no_text_are_held_back(bytes_tokenizer: Tokenizer) -> None:
    """However many: nothing is cut where a character may still be incomplete; an ending one releases them."""
    (first, *_rest) = bytes_tokenizer.encode("🙂")

    assert bytes_tokenizer.whole([first] * 30) == 0
    assert bytes_tokenizer.whole([first] * 30 + bytes_tokenizer.encode("a")) == 31
