"""Models with a chat template: what is fed is what the template makes of the messages."""

import json
import shutil

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

import kvtool as library
from kvtool.generation import compress
from kvtool.generation import generate as generate_text
from kvtool.models import reference
from kvtool.models.load import load
from tests.chat_templates import CHANGED

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOOK = "The secret code for falcon: 7429103. The old lamp was near the school."
ASKED = "The secret code for falcon:"


@pytest.fixture
def chat(kvtool, tmp_path):
    """The reference model with a chat template, in the folder `chat`."""
    shutil.copytree(reference.path(), tmp_path / "chat")
    settings = tmp_path / "chat" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": CHAT}))
    return AutoTokenizer.from_pretrained(tmp_path / "chat")


def saved(tokenizer, path="a.st"):
    """The text that a cache file has read, and what it records."""
    with safe_open(path, "pt") as file:
        ids = file.get_tensor("input_ids")[0]
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False), file.metadata()


def render(tokenizer, *talk):
    messages = [{"role": role, "content": text} for role, text in talk]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def run(kvtool, command, *arguments, stdin=b""):
    done = kvtool(command, "-m", "chat", "-f", "json", *arguments, stdin=stdin)
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


def generate(kvtool, *arguments, tokens=4, save="a.st", **more):
    return run(kvtool, "generate", "-n", str(tokens), "--save", save, *arguments, **more)


def told(tokenizer, document):
    return tokenizer.decode(document["token_ids"], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("from_file", [False, True])
def test_a_prompt_is_a_message_of_the_user(kvtool, chat, tmp_path, system, from_file):
    (tmp_path / "book.txt").write_text(f"{BOOK}\n")
    prompt = ["--prompt-file", "book.txt"] if from_file else ["--prompt", BOOK]
    before = [] if system is None else ["--system", system]
    document, said = generate(kvtool, *prompt, *before)
    talk = [("user", BOOK)] if system is None else [("system", system), ("user", BOOK)]
    messages = [{"role": role, "content": text} for role, text in talk]
    ids = chat.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    with safe_open("a.st", "pt") as file:
        assert file.get_tensor("input_ids")[0].tolist() == ids + document["token_ids"]
    assert document["prompt_tokens"] == len(ids)
    assert "chat template: the model's" in said


@pytest.mark.parametrize("template", ["auto", "off"])
@pytest.mark.parametrize("stdin", [False, True])
def test_a_file_and_a_question_are_one_message(kvtool, chat, tmp_path, template, stdin):
    (tmp_path / "book.txt").write_text(f"{BOOK}\n")
    file = ["--prompt-file", "-" if stdin else "book.txt", "--chat-template", template]
    document, _ = generate(kvtool, "--prompt", ASKED, *file, stdin=f"{BOOK}\n".encode())
    text, _ = saved(chat)
    asked = f"{BOOK}\n\n{ASKED}"
    fed = render(chat, ("user", asked)) if template == "auto" else f"<bos>{asked}"
    assert text == fed + told(chat, document)


def test_a_file_and_a_question_are_compressed_and_go_on_together(kvtool, chat, tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    both = ["--prompt-file", "book.txt", "--prompt", ASKED]
    run(kvtool, "compress", "-p", "full", "--save", "a.st", *both)
    document, _ = generate(kvtool, "--cache", "a.st", *both, save="b.st")
    text, _ = saved(chat, "b.st")
    asked = f"{BOOK}\n\n{ASKED}"
    assert text == render(chat, ("user", f"{asked}\n{asked}")) + told(chat, document)


def test_messages_are_fed_and_answers_that_are_given_are_kept(kvtool, chat):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": BOOK},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": ASKED},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]
    document, _ = generate(kvtool, "--turns", "-", stdin=json.dumps(messages).encode())
    (answer,) = (part for part in document["turns"] if part["user"] == ASKED)
    assert len(document["turns"]) == 1
    talk = [(each["role"], each["content"]) for each in messages]
    ended = told(chat, answer).removesuffix("<eos>")
    talk.insert(4, ("assistant", ended))
    expected = render(chat, *talk).removesuffix("<eos>\n[assistant]")
    # the template would trim what the model has said; the cache holds it as it was said
    expected = expected.replace(f"[assistant]{ended.strip()}<", f"[assistant]{ended}<")
    text, record = saved(chat)
    assert text == expected
    assert record["chat"] == "answer"
    with safe_open("a.st", "pt") as file:
        assert document["cache"]["tokens_seen"] == file.get_tensor("input_ids").shape[1]
        # all but the answer are counted as prompt
        assert document["prompt_tokens"] == document["cache"]["tokens_seen"] - 4


@pytest.mark.parametrize("policy", [["-p", "full"], ["-p", "h2o", "-b", "30"]])
def test_compress_leaves_the_message_open_and_generate_goes_on_with_it(kvtool, chat, policy):
    compressed, said = run(
        kvtool, "compress", *policy, "--prompt", BOOK, "--system", "Hm.", "--save", "b.st"
    )
    assert "chat template: the model's" in said
    text, record = saved(chat, "b.st")
    opened = render(chat, ("system", "Hm."), ("user", BOOK))
    assert (text, record["chat"]) == (opened.removesuffix("<eos>\n[assistant]"), "open")
    assert compressed["prompt_tokens"] == len(chat(text, add_special_tokens=False).input_ids)

    document, _ = generate(kvtool, "--cache", "b.st", "--prompt", ASKED)
    text, record = saved(chat)
    asked = render(chat, ("system", "Hm."), ("user", f"{BOOK}\n{ASKED}"))
    assert (text, record["chat"]) == (asked + told(chat, document), "answer")

    again, _ = generate(kvtool, "--cache", "a.st", "--prompt", "Why?", save="c.st")
    text, record = saved(chat, "c.st")
    answer = told(chat, document).removesuffix("<eos>")
    expected = f"{asked}{answer}<eos>\n[user]Why?<eos>\n[assistant]{told(chat, again)}"
    assert (text, record["chat"]) == (expected, "answer")

    document, _ = generate(kvtool, "--cache", "b.st")
    assert saved(chat)[0] == opened + told(chat, document)


def test_an_answer_goes_on_where_it_was_cut_off(kvtool, chat):
    whole, _ = generate(kvtool, "--prompt", ASKED, tokens=6)
    first, _ = generate(kvtool, "--prompt", ASKED, tokens=2)
    second, _ = generate(kvtool, "--cache", "a.st", tokens=4)
    assert first["token_ids"] + second["token_ids"] == whole["token_ids"]
    assert saved(chat)[1]["chat"] == "answer"


def test_turns_go_on_with_an_open_message(kvtool, chat):
    run(kvtool, "compress", "-p", "full", "--prompt", BOOK, "--save", "b.st")
    given = json.dumps([{"role": "assistant", "content": "Noted."}, ASKED]).encode()
    document, _ = generate(kvtool, "--cache", "b.st", "--turns", "-", stdin=given)
    talk = [("user", BOOK), ("assistant", "Noted."), ("user", ASKED)]
    assert saved(chat)[0] == render(chat, *talk) + told(chat, document)
    document, _ = generate(kvtool, "--cache", "b.st", "--turns", "-", stdin=ASKED.encode())
    assert saved(chat)[0] == render(chat, ("user", f"{BOOK}\n{ASKED}")) + told(chat, document)


def test_a_file_that_records_nothing_is_gone_on_from_as_it_stands(kvtool, chat):
    model = library.attach(load("chat").model)
    cache = library.build_cache(model, "full")
    ids = chat(BOOK, return_tensors="pt").input_ids
    read = compress(model, cache, ids)
    library.save_cache(cache, "b.st", input_ids=read.input_ids, next_logits=read.next_logits)
    document, said = generate(kvtool, "--cache", "b.st", "--prompt", f" {ASKED}")
    text, record = saved(chat)
    assert text == f"<bos>{BOOK} {ASKED}{told(chat, document)}"
    assert "chat" not in record
    assert "chat template: none, as in the cached text" in said
    assert "chat template" not in generate(kvtool, "--cache", "b.st")[1]
    document, _ = generate(kvtool, "--cache", "b.st", "--prompt", ASKED, "--chat-template", "on")
    text, record = saved(chat)
    assert text == f"<bos>{BOOK}[user]{ASKED}<eos>\n[assistant]{told(chat, document)}"
    assert record["chat"] == "answer"


def test_a_system_message_has_no_place_behind_a_cached_text(kvtool, chat):
    run(kvtool, "compress", "-p", "full", "--prompt", BOOK, "--save", "b.st")
    done = kvtool("generate", "-m", "chat", "--cache", "b.st", "--system", "Hm.")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --system goes before everything, and --cache holds a text")


def test_prompts_may_be_conversations(kvtool, chat, tmp_path):
    talk = [("system", "Hm."), ("user", BOOK), ("assistant", "So."), ("user", ASKED)]
    messages = [{"role": role, "content": text} for role, text in talk]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[role], "value": text} for role, text in talk]
    lines = [{"messages": messages}, {"id": "b", "conversations": shared}, {"prompt": ASKED}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["-m", "chat", "-n", "4", "-q", "-f", "json", "-p", "h2o", "-b", "40"]
    done = kvtool("generate", *options, "--prompts", "a.jsonl")
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [each["id"] for each in found] == [None, "b", None]
    model = load(str(tmp_path / "chat")).model
    for answer, said in zip(found, [messages, messages, messages[3:]], strict=True):
        ids = chat.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt")
        cache = library.build_cache(model, "h2o", 40)
        alone = generate_text(model, chat, cache, ids["input_ids"], max_new_tokens=4)
        assert answer["token_ids"] == alone.token_ids[0]
        assert answer["prompt_tokens"] == alone.prompt_tokens
    done = kvtool("generate", *options, "--prompts", "a.jsonl", "--system", "Hm.")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: prompt 0: the prompt and --system both give a system mess")
    done = kvtool("generate", *options[2:], "--prompts", "a.jsonl")
    assert done.err.startswith("error: prompt 0: a system message needs a chat template")


def test_turns_that_the_template_cannot_take_are_refused_before_any_is_answered(
    kvtool, chat, tmp_path
):
    path = tmp_path / "chat" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": CHANGED["last is marked"]}
    path.write_text(json.dumps(settings))
    options = ["generate", "-m", "chat", "-n", "4", "-q", "--turns", "-"]
    done = kvtool(*options, stdin=b"How?\nWhy?\n")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the chat template changes messages that the cache has read")
    assert kvtool(*options, stdin=b"How?\n").code == 0
