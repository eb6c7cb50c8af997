"""Files and folders whose names hold bytes that are not UTF-8."""

import json
import os
import sys

import pytest
import torch

import kvtool as package
from kvtool.cache.files.format import read_metadata
from kvtool.documents.document import dump_json
from kvtool.documents.files import write_text
from kvtool.documents.source import Source
from kvtool.documents.yaml_writer import dump_yaml
from kvtool.models import reference
from tests.models_for_tests import peaky_model, random_ids

NAME, SHOWN = os.fsdecode(b"caf\xe9"), "caf\\udce9"
GIVEN = ("-q", "-p", "h2o", "-b", "64")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="file names are text, not bytes, on other systems"
)


def is_utf8(path):
    path.read_bytes().decode()
    return True


@pytest.mark.parametrize(
    "command",
    [("plan-budget", "-b", "64"), ("generate", "--prompt", "The lamp", *GIVEN)],
    ids=["plan-budget", "generate"],
)
def test_a_model_folder_is_refused_in_one_line(kvtool, tmp_path, command):
    (tmp_path / NAME).symlink_to(reference.path())
    done = kvtool(*command, "-m", NAME)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        f"error: the name of model `{SHOWN}` is not UTF-8",
        "hint: rename it, or link to it: ln -s OLD NEW",
    ]


def test_prompt_files_outputs_and_caches_work(kvtool, tmp_path):
    (tmp_path / NAME).write_text("The old lamp")
    cache, output = f"{NAME}.safetensors", f"{NAME}.json"
    done = kvtool("generate", "--prompt-file", NAME, *GIVEN, "-n", "2", "-o", output)
    assert done.code == 0, done.err
    assert is_utf8(tmp_path / output)
    done = kvtool("compress", "--prompt-file", NAME, *GIVEN, "--save", cache, "-f", "json")
    assert done.code == 0, done.err
    assert SHOWN in json.loads(done.out)["saved"]
    done = kvtool("generate", "-q", "--cache", cache, "--prompt", "more", "-n", "2", "-f", "json")
    assert done.code == 0, done.err
    done = kvtool("plan-budget", "-q", "-b", "64", "-o", f"{NAME}.yaml")
    assert done.code == 0, done.err
    assert is_utf8(tmp_path / f"{NAME}.yaml")


def test_the_numbers_of_heads_need_a_name_that_a_profile_can_hold(kvtool):
    done = kvtool("profile", "-q", "--tokens", "64", "--samples", "1", "-o", f"{NAME}.yaml")
    assert done.code == 2
    assert done.err.startswith(f"error: --output: `{SHOWN}.heads.safetensors` is not UTF-8\n")


@pytest.mark.exhaustive
def test_a_run_folder_works_and_is_resumed(kvtool, tmp_path):
    text = " ".join(f"The lamp {i} is old." for i in range(80))
    (tmp_path / f"{NAME}.txt").write_text(text)
    asked = ("eval", *GIVEN, "-t", "ppl", "--lengths", "128", "--samples", "1")
    asked += ("--data", f"ppl={NAME}.txt", "-o", NAME, "-f", "json", "--no-plots")
    done, again = kvtool(*asked), kvtool(*asked)
    assert (done.code, again.code) == (0, 0), (done.err, again.err)
    assert "resumed" in kvtool(*(a for a in asked if a != "-q")).err
    assert all(is_utf8(path) for path in (tmp_path / NAME).rglob("*") if path.is_file())
    assert kvtool("eval", "-q", "--rescore", NAME).code == 0


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_documents_spell_the_bytes_out_and_are_read_back(kind, tmp_path):
    data = {"name": f"{NAME}: x", NAME: [NAME, "café"]}
    path = tmp_path / f"a.{kind}"
    write_text(path, dump_json(data) if kind == "json" else dump_yaml(data))
    expected = {"name": f"{SHOWN}: x", SHOWN: [SHOWN, "café"]}
    assert Source.parse(path.read_text("utf-8"), path.name).data == expected


def test_a_cache_of_a_model_with_such_a_name_is_saved_and_loaded(tmp_path):
    model = peaky_model("llama")
    model.name_or_path = model.config._name_or_path = NAME
    cache = package.build_cache(model, "h2o", 16)
    ids = random_ids(40)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    package.save_cache(cache, tmp_path / "a.safetensors", input_ids=ids)
    assert read_metadata(tmp_path / "a.safetensors")["model"] == SHOWN
    loaded = package.load_cache(tmp_path / "a.safetensors", model)
    assert torch.equal(loaded.layers[0].slots.keys, cache.layers[0].slots.keys)
