"""Streamed text: its pieces add up to the text of the whole answer, for every kind of tokenizer."""

import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtool.generation.decoding import Callback

WORDS = ["def", "f():", "return", "list", "é", "日本", "1", ".", "'s", "n't", "'", "\n", "😀"]
SPECIAL = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def numbered(pieces):
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def of_bytes():
    """GPT-2's: tokens are bytes, so that a character is spread over several."""
    core = Tokenizer(
        models.BPE(vocab=numbered(SPECIAL + pre_tokenizers.ByteLevel.alphabet()), merges=[])
    )
    core.decoder = decoders.ByteLevel()
    return core


def of_pieces(*strip):
    """Llama 2's or Gemma's: pieces, and bytes where there is no piece."""
    pieces = [form for word in WORDS for form in (word, f"▁{word}")]
    vocab = numbered([*SPECIAL, *BYTES, "▁", "▁▁▁▁", *pieces])
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return core


def of_metaspace(scheme):
    vocab = [(piece, 0.0) for piece in numbered([*SPECIAL, "▁", *WORDS, *(f"▁{w}" for w in WORDS)])]
    core = Tokenizer(models.Unigram(vocab, unk_id=2))
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return core


def of_word_pieces(*, cleanup):
    """BERT's: words with a space between them, unless a piece says that it goes on."""
    vocab = numbered([*SPECIAL, *WORDS, *(f"##{word}" for word in WORDS)])
    core = Tokenizer(models.WordPiece(vocab=vocab, unk_token="<unk>"))
    core.decoder = decoders.WordPiece(cleanup=cleanup)
    return core


def of_suffixes():
    """GPT's first: a piece says that a word ends."""
    vocab = numbered([*SPECIAL, *WORDS, *(f"{word}</w>" for word in WORDS)])
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    core.decoder = decoders.BPEDecoder()
    return core


KINDS = {
    "bytes": (of_bytes, {}),
    "pieces": (of_pieces, {}),
    "pieces that lose a space": (lambda: of_pieces(decoders.Strip(" ", 1, 0)), {}),
    "metaspace": (lambda: of_metaspace("always"), {}),
    "metaspace without a prefix": (lambda: of_metaspace("never"), {}),
    "word pieces": (lambda: of_word_pieces(cleanup=True), {}),
    "word pieces and a clean-up": (
        lambda: of_word_pieces(cleanup=False),
        {"clean_up_tokenization_spaces": True},
    ),
    "suffixes": (of_suffixes, {}),
}


def made(kind):
    core, settings = KINDS[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )
    tokenizer.add_tokens(["ADDED", AddedToken(" strips ", lstrip=True, rstrip=True)])
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    return tokenizer


def streamed(tokenizer, ids, **settings):
    pieces = []
    stream = Callback(tokenizer, pieces.append, **settings)
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "" not in pieces
    return pieces


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_text_of_all_tokens(kind, whole):
    tokenizer, draw = made(kind), random.Random(0)
    for length in [*range(1, 12), *[40] * 20, *[200] * 8]:
        ids = draw.choices(range(len(tokenizer)), k=length)
        if draw.random() < 0.5:  # fewer bytes, more spaces and lines
            ids = draw.choices(
                [*ids, *tokenizer.convert_tokens_to_ids(SPECIAL), *ids[:2]], k=length
            )
        pieces = streamed(tokenizer, ids, skip_special_tokens=not whole)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=not whole)


@pytest.mark.parametrize("kind", ["bytes", "pieces that lose a space", "metaspace"])
def test_a_token_is_told_with_the_next_one_at_the_latest(kind):
    tokenizer = made(kind)
    words = tokenizer.convert_tokens_to_ids(["a"] if kind == "bytes" else ["▁def", "return", "▁1"])
    assert len(streamed(tokenizer, words * 60)) == 60 * len(words)


def test_lines_keep_the_space_that_they_begin_with():
    tokenizer = made("pieces that lose a space")
    names = ["▁def", "▁f():", "<0x0A>", "▁▁▁▁", "return", "▁1", "<0x0A>", "▁list"]
    pieces = streamed(tokenizer, tokenizer.convert_tokens_to_ids(names))
    assert "".join(pieces) == "def f():\n    return 1\n list"


def test_bytes_wait_for_the_end_of_their_run():
    """Two bytes are a character, and with a third that makes none all three are unreadable."""
    tokenizer = made("pieces")
    good, bad = (
        tokenizer.convert_tokens_to_ids([*names, "def"])
        for names in (["<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>", "<0xFF>"])
    )
    assert "".join(streamed(tokenizer, good)) == "édef"
    assert "".join(streamed(tokenizer, bad)) == "\ufffd\ufffd\ufffddef"
