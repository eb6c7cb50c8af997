"""The kept text: its pieces, what its page holds for every switch, and its look on a terminal."""

import base64
import html
import json
import re
import zlib

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvtool
from kvtool.cache.whole.report import KeptLayer, KeptTokens
from kvtool.errors import UsageError
from kvtool.models.load import load
from kvtool.report.kept.text import PART, KeptText, in_brackets, kept_page, token_pieces
from tests.browser import ask

TOKENS, LAYERS, HEADS = 21, 3, 2


def shaded(mark=None, *, kind=KeptText, tokens=TOKENS, pieces=None, seed=0, **changes):
    """A text of which every layer and head holds other tokens."""
    source = torch.Generator().manual_seed(seed)
    layers = []
    for index in range(LAYERS):
        kept = torch.rand(HEADS, tokens, generator=source) < 0.4
        kept[:, 3], kept[:, 5] = True, False
        marked = torch.rand(HEADS, tokens, generator=source) < 0.5
        marked = marked & (kept if mark == "read" else ~kept)
        layers.append(KeptLayer(2 * index, kept, marked if mark else None))
    score = torch.arange(tokens).to(torch.uint8)
    kept = KeptTokens(tokens, tuple(layers), mark, 4 if mark == "read" else 0, score)
    pieces = tuple(f" w{i}" for i in range(tokens)) if pieces is None else tuple(pieces)
    given = {"title": "h2o, budget 8", "cost": "kept 8", "prompt": tokens - 2, "answer": "yes"}
    return kind(**(given | changes), pieces=pieces, kept=kept)


def read_data(page):
    """What the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def bits(packed, text, tokens):
    """Unpack as the script does: (heads of all layers, tokens)."""
    heads = sum(count for _, count in text["layers"])
    raw = numpy.frombuffer(zlib.decompress(base64.b64decode(packed)), numpy.uint8)
    return numpy.unpackbits(raw.reshape(heads, -1), axis=1, bitorder="little")[:, :tokens]


@pytest.mark.parametrize("mark", [None, "merged", "offloaded", "read"])
def test_the_page_holds_what_every_layer_and_head_keeps(mark):
    text = shaded(mark)
    data = read_data(kept_page([text]))
    [own] = data["texts"]
    assert own["layers"] == [[0, HEADS], [2, HEADS], [4, HEADS]]
    kept = bits(own["kept"], own, TOKENS)
    assert kept.tolist() == torch.cat([layer.kept for layer in text.kept.layers]).int().tolist()
    if mark is None:
        assert own["marked"] is None
    else:
        marked = torch.cat([layer.marked for layer in text.kept.layers]).int().tolist()
        assert bits(own["marked"], own, TOKENS).tolist() == marked
    score = zlib.decompress(base64.b64decode(own["score"]))
    assert list(score) == list(range(TOKENS))
    assert data["pieces"] + own["more"] == list(text.pieces)
    assert (own["mark"], own["prompt"]) == (mark, TOKENS - 2)


def test_two_texts_share_what_is_the_same():
    one = shaded(pieces=[f"a{i}" for i in range(TOKENS)])
    two = shaded("read", tokens=TOKENS - 1, pieces=[*one.pieces[:18], "x", "y"], seed=1)
    page = kept_page([one, two], full_answer="no <b>")
    data = read_data(page)
    assert data["pieces"] == list(one.pieces[:18])
    assert [text["more"] for text in data["texts"]] == [list(one.pieces[18:]), ["x", "y"]]
    assert html.escape("no <b>") in page


def test_no_text_ends_the_script_it_is_in():
    pieces = ["</script>", "<!--", "\u2028", "é", "\U0001f600", "\n", *["w"] * (TOKENS - 6)]
    text = shaded(pieces=pieces, title="<i>", answer="</section>")
    page = kept_page([text])
    data = read_data(page)
    assert data["pieces"] + data["texts"][0]["more"] == pieces
    assert "<i>," not in page
    assert "</section></q>" not in page


def test_the_page_stands_alone():
    page = kept_page([shaded("merged")])
    assert not re.findall(r"""(?:src|href)=|url\(|@import|https?://""", page)


def test_32k_tokens_of_32_layers_and_8_heads_take_less_than_3_mb():
    # the worst that there is to compress: every bit by chance
    source, tokens = torch.Generator().manual_seed(0), 32 * 1024
    kept = torch.rand(32 * 8, tokens, generator=source) < 0.5
    marked = ~kept & (torch.rand(kept.shape, generator=source) < 0.5)
    heads = zip(kept.split(8), marked.split(8), strict=True)
    layers = tuple(KeptLayer(i, *each) for i, each in enumerate(heads))
    words = [" garden", " the", " lamp", ".", " walked"]
    pieces = tuple(words[i] for i in torch.randint(5, (tokens,), generator=source).tolist())
    score = torch.randint(256, (tokens,), generator=source).to(torch.uint8)
    told = KeptTokens(tokens, layers, "merged", 0, score)
    page = kept_page([KeptText("h2o+d2o-merge", "half", pieces, told, tokens)])
    assert len(page.encode()) < 3_000_000


SWITCH = """
const shades = () => [...document.querySelectorAll(".text span")].map((span) => span.className);
while (document.body.dataset.ready !== "yes") await new Promise((done) => setTimeout(done, 20));
const found = [shades()];
for (const [name, value] of [["layer", "1"], ["head", "1"], ["layer", ""]]) {
  const choice = document.getElementById(name);
  choice.value = value;
  choice.dispatchEvent(new Event("change", { bubbles: true }));
  found.push(shades());
}
const text = document.querySelector(".text");
text.focus();
for (const key of ["End", "ArrowLeft"]) text.dispatchEvent(new KeyboardEvent("keydown", { key }));
return [found, document.getElementById("told").textContent, text.textContent];
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("mark", ["merged", "read"])
def test_a_browser_shades_what_the_switches_choose(mark, tmp_path):
    text = shaded(mark)
    (tmp_path / "kept.html").write_text(kept_page([text]))
    found, told, shown = ask(tmp_path / "kept.html", SWITCH)
    assert shown == "".join(text.pieces)
    layers = text.kept.layers
    choices = [
        layers,
        layers[1:2],
        [KeptLayer(0, layers[1].kept[1:], layers[1].marked[1:])],
        [KeptLayer(0, layer.kept[1:], layer.marked[1:]) for layer in layers],
    ]
    for classes, chosen in zip(found, choices, strict=True):
        keeps = torch.cat([layer.kept for layer in chosen]).sum(0)
        marks = torch.cat([layer.marked for layer in chosen]).sum(0)
        heads = sum(len(layer.kept) for layer in chosen)
        shades = keeps if mark == "merged" else marks
        for token, names in enumerate(map(str.split, classes)):
            assert f"s{-(-8 * int(shades[token]) // heads)}" in names
            assert ("gone" in names) == (keeps[token] == 0)
            assert ("new" in names) == (token >= TOKENS - 2)
            assert ("merged" in names) == (mark == "merged" and bool(marks[token]))
            assert "m2" not in names or 2 * marks[token] >= heads
    last = TOKENS - 2  # by End and one step back; all layers, head 1
    keeps = sum(int(layer.kept[1, last]) for layer in layers)
    assert told.startswith(f'token {last} " w{last}" · kept by {keeps} of {LAYERS} heads')
    assert f"score {last} of 255" in told
    assert ("in the last 4 steps" in told) == (mark == "read")


# ---- pieces


def byte_tokenizer():
    """Each byte is a token, as the rarest characters are in every byte-level tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer():
    """Words whose space is before them, and is left out at the beginning of a text."""
    words = {"▁the": 0, "▁lamp": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_character_stands_at_the_last_of_its_tokens():
    tokenizer = byte_tokenizer()
    pieces = token_pieces(tokenizer, tokenizer("aé\U0001f600b")["input_ids"])
    assert pieces == ["a", PART, "é", PART, PART, PART, "\U0001f600", "b"]
    ids = tokenizer("aé")["input_ids"][:2]
    assert len(token_pieces(tokenizer, ids)) == 2  # ends inside a character


def test_pieces_keep_the_spaces_between_words():
    pieces = token_pieces(word_tokenizer(), [0, 1, 2, 1, 0])
    assert pieces == ["the", " lamp", "s", " lamp", " the"]


def test_pieces_of_the_bundled_tokenizer_are_its_text():
    tokenizer = load().tokenizer
    text = "The secret code for falcon: 7429103.\nThe old lamp  was near the school. "
    ids = tokenizer(text)["input_ids"]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# ---- terminal


def test_without_colours_what_most_heads_hold_is_in_brackets():
    kept = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 1, 1]]).bool()
    told = KeptTokens(5, (KeptLayer(0, kept),))
    text = KeptText("h2o", "", ("a", " b", " c", " d", " e"), told, 5)
    assert in_brackets(text) == "[a b] c[ d e]"
    read = KeptTokens(5, (KeptLayer(0, torch.ones(2, 5).bool(), kept),), "read", 3)
    assert in_brackets(KeptText("quest", "", text.pieces, read, 5)) == "[a b] c[ d e]"


# ---- from a cache


@pytest.fixture(scope="module")
def loaded():
    return load()


def test_a_cache_shows_itself(loaded, tmp_path):
    text = "The secret code for falcon: 7429103. " + "The old lamp was near the school. " * 12
    cache = kvtool.compress(loaded.model, text, "h2o", 32, tokenizer=loaded.tokenizer)
    shown = cache.show()  # by the model's name
    assert isinstance(shown, KeptText)
    ids = loaded.tokenizer(text)["input_ids"]
    assert "".join(shown.pieces) == loaded.tokenizer.decode(ids)
    for layer in shown.kept.layers:
        own = [set(head[head >= 0].tolist()) for head in cache.kept_positions(layer.index)[0]]
        assert [set(head.nonzero()[:, 0].tolist()) for head in layer.kept] == own
    assert str(shown) == in_brackets(shown)
    shown.save(tmp_path / "kept.html")
    assert (tmp_path / "kept.html").read_text() == shown.html
    assert html.escape(shown.html) in shown._repr_html_()
    assert shown.title == "h2o, budget 32"
    assert shown.prompt == len(ids)


def test_rows_of_a_padded_batch_show_their_own_text(loaded):
    tokenizer, model = loaded.tokenizer, loaded.model
    texts = ["The old lamp was near the school.", "The lamp was near the old tower. " * 3]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    cache = kvtool.build_cache(model, "h2o", 12)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
    for row, text in enumerate(texts):
        shown = "".join(cache.show(tokenizer, row=row).pieces)
        assert shown.removeprefix("<bos>").startswith(text)
        assert "<pad>" not in shown
    with pytest.raises(UsageError, match=r"has read 2 x 30 tokens; .* row is 2"):
        cache.show(tokenizer, row=2)


def test_a_text_that_nobody_knows_is_asked_for(loaded):
    model, ids = loaded.model, loaded.tokenizer("The old lamp", return_tensors="pt").input_ids
    cache = kvtool.build_cache(model, "h2o", 12)
    with pytest.raises(UsageError, match="it has read nothing"):
        cache.show(loaded.tokenizer)
    model(ids, past_key_values=cache)
    with pytest.raises(UsageError, match=r"does not know its text.*input_ids=ids"):
        cache.show(loaded.tokenizer)
    with pytest.raises(UsageError, match=r"has read 1 x \d+ tokens; input_ids are 1 x 2"):
        cache.show(loaded.tokenizer, input_ids=ids[:, :2])
    shown = cache.show(loaded.tokenizer, input_ids=ids)
    assert "".join(shown.pieces).endswith("The old lamp")


def test_the_tokenizer_of_a_model_without_a_name_is_asked_for():
    from tests.models_for_tests import peaky_model, random_ids

    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "h2o", 12)
    model.generate(random_ids(20), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(UsageError, match=r"nobody knows the tokenizer.*cache.show\(tokenizer\)"):
        cache.show()
