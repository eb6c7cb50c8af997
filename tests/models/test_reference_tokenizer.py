"""The bundled tokenizer gives back any text, and keeps the words of the world whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvtool.models.reference import path
from kvtool.models.reference.vocabulary import BYTES, TOKEN_ID, TOKENS
from training.tokenizer import build_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(path())

AWKWARD = [
    "",
    "   leading and  double   spaces \n\n\ttabs\r\n",
    "\x00\x01\x7f",
    "▁falcon ▁▁ ",
    "漢字 和 かな 👩‍👩‍👧 🇫🇮 é e\u0301",
    "<0x41> <0xE2> <unk?>",
    "\ufffd\ue000\U0010ffff",
]


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(text):
    assert TOKENIZER.decode(encode(text)) == text
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True) == text


@settings(max_examples=100)
@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(encode(text)) == text


WORLD = st.sampled_from([token for token in TOKENS if token not in BYTES and token[0] != "<"])


@settings(max_examples=100)
@given(st.lists(st.one_of(WORLD, st.characters(exclude_categories=("Cs",)))).map("".join))
def test_words_of_the_world_mixed_with_anything_come_back(text):
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize("text", ["a<eos>b", "<pad> <unk>"])
def test_special_tokens_written_out_come_back(text):
    assert TOKENIZER.decode(encode(text)) == text


def test_a_known_sentence_takes_one_token_per_word_and_digit():
    ids = encode(" The secret code for falcon: 742.")
    words = [" The", " secret", " code", " for", " falcon:", " 7", "4", "2", "."]
    assert ids == [TOKEN_ID[word] for word in words]


def test_unknown_characters_become_their_bytes():
    assert encode("é") == [TOKEN_ID["<0xC3>"], TOKEN_ID["<0xA9>"]]


def test_ids_are_the_positions_in_the_vocabulary():
    assert TOKENIZER.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    assert len(TOKENIZER) == len(TOKENS)
    assert TOKEN_ID["."] == 25
    assert TOKEN_ID[" falcon"] == 41
    assert TOKEN_ID["<0x00>"] == 939


def test_stored_tokenizer_is_the_one_the_code_builds():
    built = build_tokenizer()
    stored = TOKENIZER.backend_tokenizer.to_str()
    assert built.backend_tokenizer.to_str() == stored
