"""`--prefill block` is as many tokens as suit the device, and documents name how many."""

import json

import pytest
import yaml

import kvtool as package
from kvtool import sizes
from kvtool.cache.files.format import read_metadata
from tests.models_for_tests import peaky_model
from tests.pretend_device import DEVICE, put

PROMPT = "The code is 12. " * 20
LEAST = ("--prompt", PROMPT, "-p", "h2o", "-b", "16", "--prefill", "block")
EVAL = ("-t", "niah", "--lengths", "128", "--depths", "1", "--limit", "1", "--no-plots")
BLOCK = 24


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    """A CPU has blocks of another size, as a CUDA device does."""
    assert sizes.DEVICE_BLOCKS == {"cuda": 2048}
    monkeypatch.setitem(sizes.DEVICE_BLOCKS, "cpu", BLOCK)


def test_answers_and_saved_caches_name_the_block_that_was_read(kvtool):
    done = kvtool("generate", *LEAST, "-n", "2", "--save", "a.safetensors", "-f", "json")
    assert json.loads(done.out)["prefill"] == f"block:{BLOCK}"
    assert read_metadata("a.safetensors")["prefill"] == f"block:{BLOCK}"
    sizes.DEVICE_BLOCKS.pop("cpu")  # the file goes on as it was read
    resumed = ("--cache", "a.safetensors", "--prompt", "And?", "-n", "2", "-f", "json")
    assert json.loads(kvtool("generate", *resumed).out)["prefill"] == f"block:{BLOCK}"
    done = kvtool("compress", *LEAST, "--save", "b.safetensors", "-f", "json")
    assert json.loads(done.out)["prefill"] == "block:128"
    done = kvtool("generate", *LEAST[:-2], "-n", "2", "-f", "json")
    assert "prefill" not in json.loads(done.out)


def test_a_dry_run_names_the_block_of_the_device_that_it_is_for(kvtool):
    for more, block in (((), BLOCK), (("--memory", "1GiB"), 2048)):
        done = kvtool("generate", *LEAST, "--dry-run", *more)
        assert yaml.safe_load(done.out)["prefill"] == f"block:{block}"


@pytest.mark.parametrize("written", ["block", {"mode": "block"}])
def test_runs_and_their_recipes_name_it(kvtool, tmp_path, written):
    (tmp_path / "mine.yaml").write_text(json.dumps({"kind": "recipe", "prefill": written}))
    done = kvtool("eval", "mine.yaml", "-p", "h2o", "-b", "16", *EVAL, "-o", "run", "-f", "json")
    named = f"h2o@16,block:{BLOCK}"
    assert [each["name"] for each in json.loads(done.out)["variants"]] == ["full", named]
    lock = yaml.safe_load((tmp_path / "run" / "recipe.lock.yaml").read_text())
    assert lock["prefill"] == f"block:{BLOCK}"
    assert (tmp_path / "run" / "samples" / named.replace(":", "_")).is_dir()


def test_a_run_that_was_begun_in_other_blocks_is_another_run(kvtool, tmp_path):
    given = ("eval", "-p", "h2o", "-b", "16", "--prefill", "block", *EVAL, "-o", "run", "-q")
    assert kvtool(*given).code == 0
    sizes.DEVICE_BLOCKS.pop("cpu")
    done = kvtool(*given)
    folders = {path.name for path in (tmp_path / "run" / "samples").iterdir()}
    assert done.code == 2
    assert "given under other settings" in done.err
    assert folders == {"full", f"h2o@16,block_{BLOCK}"}


def test_a_loaded_model_says_where_it_runs(monkeypatch):
    monkeypatch.setitem(sizes.DEVICE_BLOCKS, DEVICE.type, 40)
    for move, block in ((put, 40), (lambda model: model, BLOCK)):
        model = move(peaky_model("llama"))
        cache = package.build_cache(model, "h2o", 16, prefill="block")
        assert (cache.block, cache.prefill) == (block, f"block:{block}")
        assert package.build_cache(model, "h2o", 16, prefill="block:7").block == 7


def test_kvzip_reads_512_tokens_wherever_it_runs(kvtool):
    least = ("-p", "kvzip", "-b", "40", "--prefill", "block", "--prompt", PROMPT * 8, "-f", "json")
    done = kvtool("compress", *least, "--save", "a.safetensors")
    assert (done.code, json.loads(done.out)["prefill"]) == (0, "block:512")
    done = kvtool(
        "generate", "--cache", "a.safetensors", "--prompt", "And?", "-n", "2", "-f", "json"
    )
    assert json.loads(done.out)["cache"]["tokens_seen"] > 512
    answer = package.generate(
        prompt=PROMPT, policy="kvzip", budget=40, prefill="block", max_new_tokens=2
    )
    assert answer.prefill == "block:512"
    done = kvtool("eval", "-p", "kvzip", "-b", "40", "--prefill", "block", *EVAL, "-f", "json")
    named = [each["name"] for each in json.loads(done.out)["variants"]]
    assert named == ["full", "kvzip@40,block:512"]


def test_short_blocks_of_kvzip_warn_on_the_command_line(kvtool):
    least = ("-p", "kvzip", "-b", "40", "--prompt", PROMPT, "-n", "1")
    assert (
        "blocks of 64 tokens cost `kvzip` answers"
        in kvtool("generate", *least, "--prefill", "block:64").err
    )
    assert "cost `kvzip`" not in kvtool("generate", *least, "--prefill", "block:256").err
