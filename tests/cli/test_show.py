"""`--show`: the kept text of `generate` and `compress`, on a page and on stderr, one or two."""

import base64
import json
import re
import sys
import zlib

import numpy
import pytest

import kvtool as package
from kvtool.errors import UsageError

TEXT = "The secret code for falcon: 7429103. " + "The old lamp was near the school. " * 12
PROMPT = ("--prompt", TEXT, "-n", "3")


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def keeps(text, tokens):
    """How many layers and heads keep each token of a text of a page."""
    heads = sum(count for _, count in text["layers"])
    raw = numpy.frombuffer(zlib.decompress(base64.b64decode(text["kept"])), numpy.uint8)
    return numpy.unpackbits(raw.reshape(heads, -1), axis=1, bitorder="little")[:, :tokens].sum(0)


def test_generate_writes_a_page(kvtool, tmp_path):
    done = kvtool("generate", "-p", "h2o", "-b", "32", *PROMPT, "--show", "kept.html", "-f", "json")
    assert done.code == 0, done.err
    assert "kept text in" in done.err
    document = json.loads(done.out)
    page = (tmp_path / "kept.html").read_text()
    data = data_of(page)
    pieces = data["pieces"] + data["texts"][0]["more"]
    assert TEXT in "".join(pieces)
    assert sum(keeps(data["texts"][0], len(pieces))) == 32 * 8  # 4 layers of 2 KV heads
    assert len(pieces) == document["cache"]["tokens_seen"]
    assert data["texts"][0]["prompt"] == document["prompt_tokens"]
    assert f"<q>{document['text'].strip()}</q>" in page


def test_compress_writes_a_page(kvtool, tmp_path):
    flags = ("--save", "a.safetensors", "--show", "kept.html")
    done = kvtool("compress", "-p", "snapkv", "-b", "40", "--prompt", TEXT, *flags, "-q")
    assert done.code == 0, done.err
    data = data_of((tmp_path / "kept.html").read_text())
    cache = package.load_cache(tmp_path / "a.safetensors", package_model())
    [text] = data["texts"]
    expected = numpy.zeros(len(data["pieces"]), int)
    for layer in range(4):
        for head in cache.kept_positions(layer)[0]:
            expected[head[head >= 0].numpy()] += 1
    assert keeps(text, len(data["pieces"])).tolist() == expected.tolist()


def package_model():
    from kvtool.models.load import load

    return load().model


def test_a_loaded_cache_is_shown_with_what_it_goes_on_with(kvtool, tmp_path):
    kvtool("compress", "-p", "h2o", "-b", "40", "--prompt", TEXT, "--save", "a.safetensors")
    done = kvtool("generate", "--cache", "a.safetensors", "-n", "4", "--show", "kept.html", "-q")
    assert done.code == 0, done.err
    data = data_of((tmp_path / "kept.html").read_text())
    assert TEXT in "".join(data["pieces"] + data["texts"][0]["more"])


def test_a_conversation_is_shown_as_a_whole(kvtool, tmp_path):
    (tmp_path / "turns.txt").write_text("The old lamp\nThe young comet\n")
    flags = ("--turns", "turns.txt", "-n", "3", "--show", "kept.html", "-q")
    assert kvtool("generate", "-p", "h2o", "-b", "16", *flags).code == 0
    data = data_of((tmp_path / "kept.html").read_text())
    shown = "".join(data["pieces"])
    assert "The old lamp" in shown
    assert "The young comet" in shown


def test_the_terminal_is_stderr(kvtool, monkeypatch):
    done = kvtool("generate", "-p", "h2o", "-b", "32", *PROMPT, "--show", "-")
    assert done.code == 0
    assert "[..]: at least half of the layers and heads keep it" in done.err
    assert "The secret code" in done.err.replace("[", "").replace("]", "")
    assert "The secret code" not in done.out
    assert "\x1b" not in done.err
    quiet = kvtool("generate", "-p", "h2o", "-b", "32", *PROMPT, "--show", "-", "-q")
    assert "[..]" in quiet.err  # it was asked for


@pytest.mark.exhaustive
def test_text_cannot_steer_the_terminal(on_terminal):
    prompt = ("--prompt", "The old lamp \x1b]0;title\x07 was near. " * 4, "-n", "2")
    command = (sys.executable, "-m", "kvtool", "generate", "-p", "h2o", "-b", "16", *prompt)
    assert "\x1b]0" not in on_terminal(*command, "--show", "-", columns=100, notes=True)


# ---- two policies


def test_two_policies_stand_side_by_side(kvtool, tmp_path):
    done = kvtool("generate", "-p", "h2o(recent=8),snapkv", "-b", "48", *PROMPT, "--show", "k.html")
    assert done.code == 0, done.err
    alone = {
        policy: json.loads(kvtool("generate", *given, *PROMPT, "-f", "json", "-q").out)
        for policy, given in {
            "full": ("-p", "full"),
            "h2o(recent=8)": ("-p", "h2o(recent=8)", "-b", "48"),
            "snapkv": ("-p", "snapkv", "-b", "48"),
        }.items()
    }
    assert done.out.splitlines() == [f"{p}: {each['text'].strip()}" for p, each in alone.items()]
    for policy, each in alone.items():
        kept = max(each["cache"]["kept_per_layer"])
        assert re.search(rf"{re.escape(policy)}: .*kept {kept} of", done.err)
    page = (tmp_path / "k.html").read_text()
    assert f"full cache</b> <q>{alone['full']['text'].strip()}</q>" in page
    texts = data_of(page)["texts"]
    tokens = [each["cache"]["tokens_seen"] for each in list(alone.values())[1:]]
    sums = [int(keeps(text, n).sum()) for text, n in zip(texts, tokens, strict=True)]
    assert sums == [2 * sum(each["cache"]["kept_per_layer"]) for each in list(alone.values())[1:]]


def test_two_policies_on_the_terminal_and_in_a_dry_run(kvtool):
    done = kvtool("generate", "-p", "h2o,quest", "-b", "32", *PROMPT, "--show", "-")
    assert "\nh2o, budget 32: kept 32 of" in done.err
    assert "\nquest, budget 32: kept" in done.err
    dry = kvtool("generate", "-p", "h2o,quest", *PROMPT, "--show", "-", "--dry-run", "-f", "json")
    assert dry.code == 2  # several answers have no document
    dry = kvtool("generate", "-p", "h2o,quest", *PROMPT, "--show", "-", "--dry-run")
    assert [line for line in dry.out.splitlines() if "policy:" in line] == [
        "  policy: full",
        "  policy: h2o",
        "  policy: quest",
    ]


def test_a_plan_serves_both(kvtool, tmp_path):
    kvtool("plan-budget", "-b", "40", "--context", "256", "--allocator", "pyramid", "-o", "p.yaml")
    flags = ("--show", "k.html", "-q")
    done = kvtool("generate", "p.yaml", "-p", "h2o,tova", *PROMPT, *flags)
    assert done.code == 0, done.err
    texts = data_of((tmp_path / "k.html").read_text())["texts"]
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("-p", "h2o", "--show", "kept.txt"), "--show writes a page or, with -, to the terminal"),
        (("-p", "h2o", "--show", "none/kept.html"), "none"),
        (("-p", "h2o", "--show", "k.html", "-o", "k.html"), "--show and --output both write"),
        (("-p", "h2o", "--show", "k.html", "--save", "k.html"), "--save and --show both write"),
        (("-p", "h2o", "--show", "-", "--tensor-parallel"), "excludes --show: each process has"),
        (("-p", "h2o,tova"), "`generate` runs one policy, or two with --show, got 2: h2o, tova"),
        (("-p", "h2o,tova,roco", "--show", "-"), "or two with --show, got 3"),
        (("-p", "h2o,tova", "--show", "-", "-f", "json"), "--format json describes one answer"),
        (("-p", "h2o,tova", "--show", "-", "--save", "a.safetensors"), "--save goes with one"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(kvtool, monkeypatch, flags, told):
    monkeypatch.setattr("kvtool.models.load.load", None)
    done = kvtool("generate", *flags, *PROMPT)
    assert done.code in (1, 2)
    assert told in done.err
    assert done.err.count("error: ") == 1
    assert done.out == ""


# ---- Python


def test_calls_show_as_the_commands_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package.generate(None, TEXT, "h2o", 32, max_new_tokens=3, show="a.html")
    package.compress(None, TEXT, "h2o", 32, show=tmp_path / "b.html")
    for name in ("a.html", "b.html"):
        assert TEXT in "".join(data_of((tmp_path / name).read_text())["pieces"])
    with pytest.raises(UsageError, match="--show writes a page"):
        package.generate(None, TEXT, "h2o", 32, show="a.txt")
    with pytest.raises(UsageError, match=r"show='-' is for the command line; print\(cache.show"):
        package.generate(None, TEXT, "h2o", 32, show="-")
