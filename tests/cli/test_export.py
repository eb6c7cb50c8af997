"""`kvtool export` and `kvtool compress --export-vllm`: what they write, and what they refuse."""

import json

import pytest

import kvtool as kv
from kvtool.engines.llamacpp.format import read_ids
from kvtool.engines.vllm import prompt
from kvtool.engines.vllm.format import read_exported
from kvtool.models.load import load_tokenizer

TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. " * 8
COMPRESS = ("compress", "--prompt", TEXT, "-p", "snapkv(window=8)", "-b", "40", "-q")


@pytest.fixture
def book(kvtool, tmp_path):
    assert kvtool(*COMPRESS, "--save", "book.kv.safetensors").code == 0
    return tmp_path / "book.kv.safetensors"


def test_a_cache_file_is_exported(kvtool, book, tmp_path):
    done = kvtool("export", "book.kv.safetensors", "--to", "vllm", "--save", "out.safetensors")
    assert done.code == 0
    assert done.err.endswith("saved out.safetensors\n")
    data = json.loads(done.out)
    exported = read_exported(tmp_path / "out.safetensors")
    assert (data["kind"], data["slots"], data["policy"]) == ("export", 40, "snapkv(window=8)")
    assert data["virtual_ids"] == list(exported.ids)
    assert data["tokens_seen"] > 100
    shown = kvtool("export", str(book), "--save", "out.safetensors", "-q", "-f", "text").out
    assert shown == f"40 slots for {data['tokens_seen']} tokens, 80.0 KiB in float32\n"
    half = kvtool(
        "export", str(book), "--save", "half.safetensors", "-q", "-f", "json", "--dtype", "bfloat16"
    )
    assert json.loads(half.out)["bytes"] * 2 == data["bytes"]


def test_compress_exports_in_one_go(kvtool, book, tmp_path):
    (tmp_path / "served").mkdir()
    done = kvtool(*COMPRESS[:-1], "--save", "novel.kv.safetensors", "--export-vllm", "served")
    assert done.code == 0
    assert "exported served/novel.safetensors" in done.err
    kvtool("export", str(book), "--save", "book.safetensors", "-q")
    both = [tmp_path / "served" / "novel.safetensors", tmp_path / "book.safetensors"]
    assert read_exported(both[0]).ids == read_exported(both[1]).ids


def test_a_cache_file_is_exported_for_llama_cpp(kvtool, book, tmp_path):
    export = ("export", str(book), "--to", "llamacpp", "--save", "out.bin")
    done = kvtool(*export, "-f", "json")
    assert done.code == 0
    data = json.loads(done.out)
    assert read_ids(tmp_path / "out.bin") == data["virtual_ids"]
    assert data["text"].startswith("kvtool cache ")
    assert (data["dtype"], data["bytes"]) == ("f16", (tmp_path / "out.bin").stat().st_size)
    old = ("--engine-version", "2", "--type", "f32", "--no-flash-attention", "--streams", "4")
    assert json.loads(kvtool(*export, "-f", "json", *old).out)["dtype"] == "f32"
    head = (tmp_path / "out.bin").read_bytes()
    assert int.from_bytes(head[4:8], "little") == 2
    document = kv.export(
        book,
        tmp_path / "again.bin",
        to="llamacpp",
        engine_version=2,
        type="f32",
        flash_attention=False,
        streams=4,
    )
    assert (tmp_path / "again.bin").read_bytes() == head
    assert document.text == data["text"]


def test_compress_exports_for_two_engines_in_one_go(kvtool, book, tmp_path):
    (tmp_path / "slots").mkdir()
    folders = ("--export-llamacpp", "slots", "--export-vllm", ".")
    done = kvtool(*COMPRESS[:-1], "--save", "novel.kv.safetensors", *folders)
    assert done.code == 0
    assert "exported slots/novel.bin" in done.err
    kvtool("export", str(book), "--to", "llamacpp", "--save", "book.bin", "-q")
    kvtool("export", str(book), "--save", "book.safetensors", "-q")
    assert (tmp_path / "slots/novel.bin").read_bytes() == (tmp_path / "book.bin").read_bytes()
    both = [read_exported(tmp_path / f"{name}.safetensors").ids for name in ("novel", "book")]
    assert both[0] == both[1]
    alone = kvtool(*COMPRESS[:-1], "--export-llamacpp", "slots", "-f", "json")
    assert json.loads(alone.out)["saved"] == "slots/prompt.bin"


def test_python_exports_a_file_as_the_command_does(kvtool, book, tmp_path):
    document = kv.export(book, tmp_path / "a.safetensors")
    done = kvtool("export", str(book), "--save", "b.safetensors", "-q")
    data = json.loads(done.out)
    assert document.to_data() == data | {"saved": str(tmp_path / "a.safetensors")}


def test_a_prompt_is_the_virtual_ids_and_the_question(kvtool, book, tmp_path):
    kvtool("export", str(book), "--save", "out.safetensors", "-q")
    file = tmp_path / "out.safetensors"
    ids = list(read_exported(file).ids)
    tokenizer = load_tokenizer(None)[0]
    question = " The secret code for falcon:"
    typed = tokenizer(question, add_special_tokens=False)["input_ids"]
    assert prompt(file, [5, 6]) == [*ids, 5, 6]
    assert prompt(str(file), question, tokenizer) == [*ids, *typed]
    for wrong, told in (([], "no question"), ("why", "needs the tokenizer")):
        with pytest.raises(kv.UsageError, match=told):
            prompt(file, wrong)
    with pytest.raises(kv.UsageError, match="no cache that kvtool has exported"):
        prompt(book, [5])
    with pytest.raises(kv.UsageError, match="gone"):
        prompt(tmp_path / "gone.safetensors", [5])


REFUSED = {
    "no cache": (["--save", "x.safetensors"], 2, "no cache is given"),
    "nowhere": (["book.kv.safetensors"], 2, "no file to save to"),
    "suffix": (["book.kv.safetensors", "--save", "x.bin"], 2, "must end in .safetensors"),
    "itself": (
        ["book.kv.safetensors", "--save", "./book.kv.safetensors"],
        2,
        "--save would write over the cache",
    ),
    "a type of old llama.cpp": (
        [
            "book.kv.safetensors",
            "--to",
            "llamacpp",
            "--type=q8_0",
            "--engine-version=2",
            "--save=x.bin",
        ],
        2,
        "--type f16, or --engine-version 4",
    ),
    "another engine's option": (
        ["book.kv.safetensors", "--save", "x.safetensors", "--streams", "2"],
        2,
        "--streams is not for --to vllm\nhint: vllm takes --dtype",
    ),
    "engine": (["book.kv.safetensors", "--to", "sglang"], 2, "sglang"),
    "no file of kvtool": (["other.safetensors", "--save", "x.safetensors"], 1, "other.safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(kvtool, book, tmp_path, case):
    arguments, code, told = REFUSED[case]
    (tmp_path / "other.safetensors").write_bytes(b"no tensors")
    done = kvtool("export", *arguments)
    assert done.code == code
    assert told in done.err
    assert done.out == ""
    assert not (tmp_path / "x.safetensors").exists()


def test_compress_refuses_what_cannot_be_exported_before_it_reads(kvtool, tmp_path):
    (tmp_path / "served").mkdir()
    export = ("--export-vllm", "served")
    reader = kvtool(
        "compress", "--prompt", TEXT, "-p", "quest", "-b", "40", "--save", "a.safetensors", *export
    )
    assert (reader.code, list(tmp_path.glob("*.safetensors"))) == (2, [])
    assert "`quest` reads a part of the cache at each step" in reader.err
    gone = kvtool(*COMPRESS, "--save", "a.safetensors", "--export-vllm", "gone")
    assert (gone.code, "mkdir -p gone" in gone.err) == (2, True)


def test_compress_exports_without_a_cache_file(kvtool, book, tmp_path):
    """The exported file has the name of the prompt's file, `prompt` without one."""
    (tmp_path / "served").mkdir()
    (tmp_path / "novel.v2.txt").write_text(TEXT)
    export = ("--export-vllm", "served")
    done = kvtool(*COMPRESS[:-1], *export, "-f", "json")
    saved = json.loads(done.out)["saved"]
    assert (done.code, saved) == (0, "served/prompt.safetensors")
    assert done.err.endswith("exported served/prompt.safetensors\n")
    text = ("--prompt-file", "novel.v2.txt")
    assert kvtool("compress", *text, *COMPRESS[3:], *export).code == 0
    kv.compress(None, TEXT, "snapkv(window=8)", 40, export_vllm="served")
    kvtool("export", str(book), "--save", "book.safetensors", "-q")
    expected = read_exported(tmp_path / "book.safetensors").ids
    found = sorted((tmp_path / "served").iterdir())
    assert [each.name for each in found] == ["novel.v2.safetensors", "prompt.safetensors"]
    assert all(read_exported(each).ids == expected for each in found)
    none = kvtool(*COMPRESS)
    assert (none.code, "no file to save to" in none.err) == (2, True)


def test_a_cache_is_exported_with_the_model_that_its_file_names(kvtool, tmp_path, monkeypatch):
    assert kvtool(*COMPRESS, "-m", "reference-trace", "--save", "a.kv.safetensors").code == 0
    export = ("export", "a.kv.safetensors", "--save", "a.safetensors")
    done = kvtool(*export, "-f", "json")
    assert (done.code, json.loads(done.out)["model"]) == (0, "reference-trace")
    assert "model: reference-trace, of which the cache is (change: --model)" in done.err
    assert "model: reference-trace\n" in kvtool(*export, "--dry-run").out
    exported = kv.export(tmp_path / "a.kv.safetensors", tmp_path / "b.safetensors")
    assert exported.model == "reference-trace"
    monkeypatch.setenv("KVTOOL_MODEL", "reference")
    assert kvtool(*export).code == 0
    other = kvtool(*export, "-m", "reference")
    assert (other.code, "of another model, `reference-trace`" in other.err) == (1, True)


def test_a_dry_run_says_what_would_be_done(kvtool, book):
    done = kvtool("export", str(book), "--save", "x.safetensors", "--dry-run", "-f", "json")
    assert done.code == 0
    assert json.loads(done.out)["save"] == "x.safetensors"
