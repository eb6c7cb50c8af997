"""The tokens of a GGUF file that end an answer are those at which llama.cpp ends it."""

import json

import pytest

import kvtool
from kvtool import generation
from kvtool.errors import UsageError
from kvtool.models.folder import check_folder, find_source
from kvtool.models.gguf import read_header
from kvtool.models.gguf_ends import TOKENS, WORDS, list_ends
from kvtool.models.load import convert, load
from tests.models import tiny_gguf

FILLS = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
VOCABULARIES = {  # tokens, settings, and the texts of those that end an answer
    "llama 2": (["<s>", "</s>", "<unk>"], {"eos": 1}, ["</s>"]),
    "llama 3": (
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>"],
        {"eos": 2},
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    ),
    "qwen": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *FILLS, "<|fim_prefix|>"],
        {"eos": 2, "fim_pad": 3},
        ["<|im_end|>", "<|endoftext|>", *FILLS],
    ),
    "gemma": (["<pad>", "<eos>", "<end_of_turn>"], {"eos": 1}, ["<eos>", "<end_of_turn>"]),
    "gemma 4": (
        ["</s>", "<eos>", "<turn|>", "<|tool_response>"],
        {"eos": 2},
        ["<turn|>", "<eos>", "<|tool_response>"],
    ),
    "phi 3": (["<|end|>", "<|endoftext|>"], {"eos": 1}, ["<|endoftext|>", "<|end|>"]),
    "gpt-oss": (
        ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"],
        {"eos": 1, "eot": 0},
        ["<|return|>", "<|call|>", "<|endoftext|>"],
    ),
    "solar open": (
        ["<|end|>", "<|flush|>", "<|calls|>"],
        {"eos": 1},
        ["<|flush|>", "<|calls|>"],
    ),
    "a call without a return": (["<|end|>", "<|call|>"], {}, ["<|end|>", "<|call|>"]),
    "kimi": (
        ["[BOS]", "[EOS]", "[EOT]", "[PAD]", "<|im_end|>"],
        {"eos": 1},
        ["[EOS]", "<|im_end|>", "[EOT]", "[PAD]"],
    ),
    "granite": (
        ["<|end_of_text|>", "<fim_pad>", "<reponame>"],
        {"eos": 0},
        ["<|end_of_text|>", "<fim_pad>", "<reponame>"],
    ),
    "codellama": (
        ["</s>", "<EOT>", "_<EOT>", "<PAD>", "<REPO>"],
        {"eos": 0, "eot": 1},
        ["</s>", "<EOT>", "_<EOT>", "<PAD>", "<REPO>"],
    ),
    "smoldocling": (["<end_of_utterance>", "a"], {"eos": 0}, ["<end_of_utterance>"]),
    "only settings": (["a", "b", "c", "d"], {"eos": 3, "eot": 0, "eom": 1}, ["d", "a", "b"]),
    "a setting overrides texts": (["a", "<|fim_pad|>", "<PAD>"], {"fim_pad": 0}, ["a"]),
    "one text of a kind": (["<fim-repo>", "<|fim_repo|>"], {}, ["<|fim_repo|>"]),
    "settings out of range": (["a", "<fim-pad>"], {"eos": 2, "fim_pad": 9}, ["<fim-pad>"]),
    "odd settings": (["a", "b"], {"eos": True, "eot": "b", "eom": -1}, []),
    "other texts": (["<|im_start|>", "<|eot|>", " </s>", "<|END|>"], {}, []),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_as_llama_cpp(name):
    tokens, named, expected = VOCABULARIES[name]
    settings = {f"tokenizer.ggml.{kind}_token_id": value for kind, value in named.items()}
    words = {text: i for i, text in enumerate(tokens) if text.encode() in WORDS}
    found = list_ends(settings | {TOKENS: len(tokens)}, words)
    assert [tokens[each] for each in found] == expected


def test_each_text_is_one_of_a_vocabulary():
    tokens = {text for tokens, _, _ in VOCABULARIES.values() for text in tokens}
    assert {word.decode() for word in WORDS} <= tokens


# ---- of files

pytest.importorskip("gguf", reason="GGUF files need the package gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    changes = {"tokenizer.ggml.eot_token_id": 77}
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", changes=changes)


def test_a_file_is_searched_for_the_texts(file):
    assert read_header(file, "it").words == {"<|endoftext|>": 0, "<|im_end|>": 2}


def test_they_reach_the_settings_that_generation_reads(file, tmp_path):
    assert load(str(file)).model.generation_config.eos_token_id == [2, 77, 0]
    convert(str(file), tmp_path / "out", progress=False)
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [2, 77, 0]
    assert load(str(tmp_path / "out")).model.generation_config.eos_token_id == [2, 77, 0]


def test_a_named_end_of_turn_ends_an_answer(tmp_path):
    """The file names a token that comes up in the answer that it gives without that name."""

    def answer(changes):
        loaded = load(str(tiny_gguf.write(tmp_path / "a.gguf", changes=changes)))
        cache = kvtool.build_cache(loaded.model, "full")
        ids = loaded.tokenizer("the sea", return_tensors="pt")["input_ids"]
        out = generation.generate(loaded.model, loaded.tokenizer, cache, ids, max_new_tokens=8)
        return out.token_ids[0]

    whole = answer({})
    assert len(whole) == 8
    end = whole.index(whole[3]) + 1
    assert answer({"tokenizer.ggml.eot_token_id": whole[3]}) == whole[:end]


# ---- a projector beside the model


@pytest.mark.parametrize("projector", ["mmproj-a.gguf", "a-projector.gguf"])
def test_a_projector_beside_the_model_is_passed_over(file, tmp_path, projector):
    (tmp_path / "model.gguf").symlink_to(file)
    tiny_gguf.write(tmp_path / projector, architecture="clip")
    assert find_source(str(tmp_path)).gguf.file == "model.gguf"
    check_folder(str(tmp_path))
    (tmp_path / "other.gguf").symlink_to(file)
    with pytest.raises(UsageError, match=rf"holds 2 GGUF files; -m {tmp_path}/model\.gguf"):
        check_folder(str(tmp_path))


def test_a_projector_alone_is_refused(tmp_path):
    tiny_gguf.write(tmp_path / "mmproj.gguf", architecture="clip")
    for name in (tmp_path, tmp_path / "mmproj.gguf"):
        with pytest.raises(UsageError, match="holds no model, but: a projector of images"):
            check_folder(str(name))
