"""The words of the synthetic world, and the token list in id order.

A token that starts a word carries its leading space, so decoding is plain concatenation. Ids are
positions in `TOKENS`: add words at the end, or every stored checkpoint changes its meaning.
"""

import re

import numpy as np


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words("""
falcon lamp harbor violin copper garden ladder mirror pepper canyon rocket saddle turtle velvet
anchor basket beacon bottle branch bridge bucket button cactus camera candle canvas carpet
castle cellar cherry circle clover cobalt coffee comet compass coral cotton cradle crystal
curtain dagger desert diamond dragon drawer eagle ember engine feather fiddle flame flute forest
fossil fountain garlic ginger glacier goblet granite guitar hammer hammock helmet heron hollow
honey igloo island ivory jacket jasmine jungle kettle kitten lantern lemon lettuce lily linen
lizard lotus magnet mango maple marble meadow medal melon meteor mitten monkey mosaic muffin
napkin needle nickel nutmeg oasis olive onion orchid otter oyster paddle palace panda panther
parrot pebble pencil penguin piano pickle pigeon pillow pirate planet plum pocket pony poppy
potato prism puddle pumpkin puppet quartz quilt rabbit radar radish raven ribbon river robin
ruby saffron salmon sandal sapphire satin scarf shadow shell silver siren sparrow spider spiral
spoon spruce statue sugar sunset swan tablet tartan teapot temple thistle thunder ticket tiger
timber toffee tomato topaz torch tractor trumpet tulip tunnel turban turnip umbrella valley
vanilla vase violet walnut walrus whistle willow window winter wizard yarrow zebra zephyr acorn
almond apricot badger bamboo banjo barley beetle bison blanket
""")

ADJECTIVES = _words("""
old red quiet small bright heavy gentle broken golden hidden narrow frozen dusty lonely clever
rapid distant simple proud silent warm cold young famous empty tall green blue crooked polished
ancient curious sleepy rusty humble
""")

VERBS = _words("""
carried found painted watched followed lost bought sold cleaned opened moved admired repaired
borrowed hid described dropped lifted noticed returned studied traded wrapped washed guarded
sketched collected buried
""")

NAMES = _words("""
Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karin Lukas Maria Nils Olga Peter
Rosa Simon Tara Ulrich Vera Walter Xenia Yusuf Zelda Oscar
""")

PLACES = _words("""
market station library village mountain kitchen square museum theater school hospital tower
beach farm church airport cabin workshop corridor balcony
""")

ADVERBS = _words("""
slowly again yesterday quickly today early often later carefully together quietly twice
""")

FUNCTION_WORDS = _words("""
The A In At the a in at of to and near was is are by behind under with from for that then but
not it he she they were there There while because before after One morning evening day night
When Nobody Everyone knew said would could have had secret code codes phrase What Which
variables value Question Answer Let equals most common words Words List word route stops Recap
three counted years ago people thought some Some very on his her
""")

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
PUNCTUATION = ".,?:=\n;!'\"-()/"
VARIABLES = [a + b for a in "BCDFGHJKLMNPQRSTVWXZ" for b in "AEIOUY"]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS, UNK = range(len(SPECIAL))
BYTES = [f"<0x{value:02X}>" for value in range(256)]
KEYS = NOUNS + VARIABLES  # words that also exist with a colon, so a value follows its key at once


def _tokens() -> list[str]:
    words = NOUNS + ADJECTIVES + VERBS + NAMES + PLACES + ADVERBS + FUNCTION_WORDS + VARIABLES
    tokens = [*SPECIAL, " ", *DIGITS, *(" " + digit for digit in DIGITS), *PUNCTUATION]
    tokens += [" =", " (", *(" " + word for word in words), *(f" {key}:" for key in KEYS), *LETTERS]
    return list(dict.fromkeys(tokens)) + BYTES


TOKENS = _tokens()
TOKEN_ID = {token: index for index, token in enumerate(TOKENS)}


_PIECE = re.compile(r" ?(?:[a-z]+|[A-Z]{2}):| ?[A-Za-z]+| ?[0-9]| ?[^A-Za-z0-9 ]| ")


def encode(text: str) -> list[int]:
    """Return the ids of text made of known tokens only, as the tokenizer would.

    >>> [TOKENS[token] for token in encode(" The code for falcon: 74.")]
    [' The', ' code', ' for', ' falcon:', ' 7', '4', '.']
    """
    return [TOKEN_ID[piece] for piece in _PIECE.findall(text)]


def decode(ids: list[int]) -> str:
    """Return the text of ids below the byte tokens; special tokens are left out."""
    return "".join(TOKENS[token] for token in ids if token >= len(SPECIAL))


def digits(rng: np.random.Generator, count: int) -> list[int]:
    """Draw a number of `count` digits, one token each, the first with its leading space."""
    first, *rest = rng.integers(0, 10, count).tolist()
    return [TOKEN_ID[f" {first}"], *(TOKEN_ID[str(digit)] for digit in rest)]
