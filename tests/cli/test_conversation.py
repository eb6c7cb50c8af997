"""`kvtool generate --turns`, and notes on texts that are longer than the model was trained for."""

import json
import shutil

import pytest
import yaml

from kvtool.documents.generation import GenerationDocument
from kvtool.models import reference

FACTS = "The secret code for falcon: 7429103. The old lamp was near the school."
SAID = ["The secret code for falcon:", "The old lamp was near", "The secret code for falcon:"]
SYSTEM = b'[{"role": "system", "content": "a"}, "b"]'


@pytest.fixture
def turns(tmp_path):
    (tmp_path / "turns.txt").write_text("".join(f"{turn}\n" for turn in SAID))
    return "turns.txt"


def generate(kvtool, *arguments, **more):
    """Run quietly and return the document."""
    done = kvtool("generate", "-q", "-f", "json", *arguments, **more)
    assert (done.code, done.err) == (0, "")
    return GenerationDocument(**json.loads(done.out))


def test_answers_are_printed_one_after_another(kvtool, turns):
    done = kvtool("generate", "--prompt", FACTS, "--turns", turns, "-n", "7")
    assert done.code == 0
    answers = done.out.split("\n")
    assert len(answers) == 4
    assert answers[0] == answers[2] == " 7429103"
    assert answers[1].startswith(" the school")
    notes = [line for line in done.err.splitlines() if line.startswith("turn ")]
    assert notes == [f"turn {i + 1}: {turn}" for i, turn in enumerate(SAID)]
    assert "21 tokens at" in done.err


@pytest.mark.parametrize("policy", [["-p", "h2o+caote", "-b", "30"], ["-p", "full"]])
def test_the_document_holds_every_turn_and_the_totals(kvtool, turns, policy):
    options = ["--prompt", FACTS, "--turns", turns, "-n", "5", *policy]
    document = generate(kvtool, *options)
    parts = document.turns
    assert [part.user for part in parts] == SAID
    assert document.token_ids == [token for part in parts for token in part.token_ids]
    assert document.new_tokens == len(document.token_ids) == 15
    assert document.text == "\n".join(part.text for part in parts)
    assert kvtool("generate", "-q", *options).out == f"{document.text}\n"
    alone = generate(kvtool, "--prompt", FACTS, "-n", "1").prompt_tokens
    assert document.prompt_tokens == alone + sum(part.prompt_tokens for part in parts)
    assert document.cache == parts[-1].cache
    assert document.cache.tokens_seen == document.prompt_tokens + document.new_tokens - 1
    held = 30 if "-b" in policy else document.cache.tokens_seen
    assert document.cache.kept_per_layer == [held] * 4
    seen = [part.cache.tokens_seen for part in parts]
    more = [part.prompt_tokens + part.new_tokens for part in parts]
    assert seen == [alone + more[0] - 1, seen[0] + more[1], seen[1] + more[2]]
    assert document.timing.prefill_s > sum(part.timing.prefill_s for part in parts)


@pytest.mark.few(2)
@pytest.mark.parametrize("prefill", ["full", "block:9"])
@pytest.mark.parametrize("policy", ["h2o+caote", "snapkv(window=4)"])
def test_a_saved_conversation_goes_on(kvtool, tmp_path, turns, policy, prefill):
    (tmp_path / "first.txt").write_text(f"{SAID[0]}\n")
    (tmp_path / "rest.jsonl").write_text("".join(f"{json.dumps(turn)}\n" for turn in SAID[1:]))
    options = ["-p", policy, "-b", "30", "--prefill", prefill]
    whole = generate(kvtool, *options, "--prompt", FACTS, "--turns", turns, "-n", "6")
    given = [*options, "--prompt", FACTS, "-n", "6"]
    first = generate(kvtool, *given, "--turns", "first.txt", "--save", "a.st")
    rest = generate(kvtool, "--cache", "a.st", "--turns", "rest.jsonl", "-n", "6")
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert rest.cache.kept_per_layer == whole.cache.kept_per_layer
    kvtool("compress", "-q", *options, "--prompt", FACTS, "--save", "b.st")
    again = generate(kvtool, "--cache", "b.st", "--turns", turns, "-n", "6")
    assert again.token_ids == whole.token_ids


def test_turns_need_no_prompt(kvtool):
    lines = f"{SAID[0]}\n{SAID[1]}\n".encode()
    document = generate(kvtool, "--turns", "-", "-n", "4", stdin=lines)
    first = generate(kvtool, "--prompt", SAID[0], "-n", "4")
    assert document.turns[0].token_ids == first.token_ids
    assert document.turns[0].prompt_tokens == first.prompt_tokens
    assert len(document.turns) == 2


def test_text_as_it_stands(kvtool, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "{FACTS}"}}\n{{"prompt": " {SAID[0]}"}}\n')
    document = generate(kvtool, "--turns", "a.jsonl", "-n", "4")
    first = generate(kvtool, "--prompt", FACTS, "-n", "4", "--save", "a.st")
    second = generate(kvtool, "--cache", "a.st", "--prompt", f" {SAID[0]}", "-n", "4")
    assert [turn.token_ids for turn in document.turns] == [first.token_ids, second.token_ids]


def test_streams_are_the_same_text(kvtool, turns):
    options = ["generate", "-q", "--prompt", FACTS, "--turns", turns, "-n", "6"]
    assert kvtool(*options, "--stream").out == kvtool(*options, "--no-stream").out
    done = kvtool(*options[:1], *options[2:], "--stream", "-f", "json")
    assert all(turn["text"] in done.err for turn in json.loads(done.out)["turns"])
    kvtool(*options, "-o", "a.txt")
    with open("a.txt") as file:
        assert file.read() == kvtool(*options).out


def test_every_turn_draws_from_a_seed_of_its_own(kvtool, turns):
    options = ["--turns", turns, "-n", "8", "--temperature", "1.5", "--seed", "3"]
    first = generate(kvtool, *options)
    assert generate(kvtool, *options).token_ids == first.token_ids
    alone = generate(kvtool, "--prompt", SAID[0], *options[2:])
    assert alone.token_ids == first.turns[0].token_ids
    assert first.turns[0].token_ids != first.turns[2].token_ids


def test_a_stop_text_ends_each_answer(kvtool, turns):
    document = generate(kvtool, "--prompt", FACTS, "--turns", turns, "-n", "9", "--stop", "42")
    assert document.turns[0].text == document.turns[2].text == " 742"
    assert document.turns[1].new_tokens == 9 or "42" in document.turns[1].text


def test_each_turn_is_compared_with_the_full_cache(kvtool, turns):
    options = ["--prompt", FACTS, "--turns", turns, "-n", "6", "--compare-full", "-p", "streaming"]
    roomy, tight = (generate(kvtool, *options, "-b", size) for size in ("1K", "12"))
    assert (roomy.fidelity.agreement, roomy.fidelity.first_divergence) == (1.0, None)
    parts = [turn.fidelity for turn in tight.turns]
    assert tight.fidelity.agreement == pytest.approx(sum(part.agreement for part in parts) / 3)
    assert tight.fidelity.kl == pytest.approx(sum(part.kl for part in parts) / 3)
    places = [
        6 * i + part.first_divergence
        for i, part in enumerate(parts)
        if part.first_divergence is not None
    ]
    assert tight.fidelity.first_divergence == places[0]


def test_dry_run_lists_the_turns_and_loads_nothing(kvtool, turns, monkeypatch):
    monkeypatch.setattr("kvtool.models.attached.load", None)
    done = kvtool("generate", "--turns", turns, "--dry-run")
    resolved = yaml.safe_load(done.out)
    assert done.code == 0
    assert resolved["turns"] == SAID
    assert (resolved["prompt"], resolved["max_new_tokens"]) == ("none", 128)


@pytest.mark.parametrize(
    ("policy", "prompt"), [("kvzip", True), ("kvzip+int8", False), ("snapkv(window=8)", True)]
)
def test_what_turns_hold_is_forecast(kvtool, tmp_path, policy, prompt):
    """`kvzip` cuts the first turn alone, with or without a context before it."""
    first = "\n".join([FACTS] * 6)
    said = [SAID[0] if prompt else first.replace("\n", " "), " ".join([FACTS] * 4), SAID[2]]
    (tmp_path / "turns.txt").write_text("".join(f"{turn}\n" for turn in said))
    options = ["--turns", "turns.txt", "-p", policy, "-b", "64", "-n", "6"]
    options += ["--prompt", first] if prompt else []
    told = yaml.safe_load(kvtool("generate", *options, "--dry-run").out)["memory"]
    held = generate(kvtool, *options).cache
    forecast, bytes_held = (
        told["kv_bytes"] + told["state_bytes"],
        held.allocated_bytes + held.state_bytes,
    )
    assert bytes_held <= forecast < 1.15 * bytes_held  # heads of unequal counts fill 7/8 at least
    assert told["peak_bytes"] > told["weights_bytes"] + held.peak_bytes
    assert (told["prompt_tokens"], told["new_tokens"]) == (held.tokens_seen - 5, 6)


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["--turns", "-", "--prompt-file", "-"], b"a", "--prompt-file and --turns both read stdin"),
        (["-", "--turns", "-"], b"a", "the recipe and --turns both read stdin"),
        (["--turns", "-"], b"", "stdin holds no turn"),
        (["--chat-template", "on"], b"", "the tokenizer has no chat template"),
        (
            ["--prompt", "a", "--system", "b"],
            b"",
            "a system message needs a chat template, and",
        ),
        (["--system", " "], b"", "--system is empty"),
        (["--system", "a", "--chat-template", "off"], b"", "--system goes into the chat template"),
        (["--turns", "-"], b'[{"role": "assistant", "content": "a"}, "b"]', "--turns begins with"),
        (
            ["--turns", "-", "--system", "a"],
            SYSTEM,
            "--turns gives a system message, and --system gives one",
        ),
        (["--turns", "-", "--chat-template", "off"], SYSTEM, "--turns gives a system message, and"),
        (["--turns", "-", "--chat-template", "on"], b"a", "the tokenizer has no chat template"),
    ],
)
def test_mistakes(kvtool, arguments, stdin, said):
    done = kvtool("generate", "-q", *arguments, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {said}")


@pytest.fixture
def short(tmp_path):
    """The reference model, but as if it had been trained for 40 tokens."""
    shutil.copytree(reference.path(), tmp_path / "short")
    path = tmp_path / "short" / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 40}
    path.write_text(json.dumps(config))
    return ["-m", "short"]


def test_a_text_longer_than_the_trained_length_is_noted_once(kvtool, short, turns):
    prompt = ["--prompt", FACTS, *short]
    options = [*prompt, "-n", "9"]
    tokens = generate(kvtool, *options).prompt_tokens
    assert "trained for" not in kvtool("generate", *options).err
    most = str(41 - tokens)
    done = kvtool("generate", *prompt, "-n", most)
    assert f"note: {tokens} tokens and up to {most} new ones are more than the 40" in done.err
    done = kvtool("generate", *options, "--turns", turns)
    assert done.err.count("are more than the 40 that the model was trained for") == 1
    assert kvtool("generate", "-q", *options, "--turns", turns).err == ""
    long = ["-p", "h2o", "-b", "9", "--save", "a.st", *short]
    assert "trained for" not in kvtool("compress", "--prompt", FACTS, *long).err
    assert "are more than the 40" in kvtool("compress", "--prompt", f"{FACTS} {FACTS}", *long).err
    assert "are more than the 40" in kvtool("generate", "--cache", "a.st", *short, "-n", "2").err


def test_a_text_numbered_by_the_cache_stays_inside_the_trained_length(kvtool, short):
    stream = ["--prompt", f"{FACTS} {FACTS}", *short, "-p", "streaming(positions=cache)", "-b", "9"]
    blocks = kvtool("generate", *stream, "-n", "60", "--prefill", "block:8")
    assert (blocks.code, "trained for" in blocks.err) == (0, False)
    at_once = kvtool("generate", *stream, "-n", "2")
    assert "are more than the 40" in at_once.err
    by_text = kvtool("generate", *stream[:-4], "-p", "streaming", "-b", "9", "-n", "60")
    assert "are more than the 40" in by_text.err


def test_eval_notes_prompts_that_may_be_longer_than_the_trained_length(kvtool, short):
    options = ["eval", "-t", "niah", "--lengths", "38", "--dry-run", "-p", "h2o", "-b", "9"]
    done = kvtool(*options, *short, "--max-length", "41")
    assert "note: 41 tokens are more than the 40 that the model was trained for" in done.err
    assert "trained for" not in kvtool(*options, *short, "--max-length", "40").err
