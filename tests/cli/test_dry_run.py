"""A dry run against the run: tokens, bytes of keys, values and state, and whether it fits."""

import json
from pathlib import Path

import pytest
import yaml

from kvtool.calls.needle import write_needle
from kvtool.model_shape import layer_shapes
from kvtool.models.load import load, load_config
from tests.models.published import LLAMA_3

PROMPT = " ".join(["The old lamp was near the school."] * 30)
NEW = 6


def foretold(kvtool, command, *arguments):
    done = kvtool(command, *arguments, "--dry-run", "-q", "-f", "json")
    assert (done.code, done.err) == (0, ""), done.err
    return json.loads(done.out)["memory"]


def ran(kvtool, command, *arguments):
    done = kvtool(command, *arguments, "-q", "-f", "json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("policy", "budget", "mode"),
    [
        ("h2o+calidrop", "25%", "full"),
        ("full+fp8", "64", "full"),
        ("duoattention", "25%", "full"),
        ("adakv+int8", "48KiB", "block:32"),
        ("kvzip", "64", "full"),
        ("quest(k=20)", "2MiB", "full"),
        ("rocketkv(window=8)", "400KiB", "full"),
        ("rocketkv-mt", "64", "block:32"),
        ("h2o+d2o-alloc", "64", "block:32"),
        ("streaming(positions=cache)", "400KiB", "block:32"),
    ],
)
def test_generate_holds_what_was_told(kvtool, policy, budget, mode):
    """One of each kind; `tests/planning/test_forecast.py` has all."""
    given = ("--prompt", PROMPT, "-p", policy, "-b", budget, "-n", str(NEW), "--prefill", mode)
    told, document = foretold(kvtool, "generate", *given), ran(kvtool, "generate", *given)
    held = document["cache"]
    assert told["prompt_tokens"] == document["prompt_tokens"]
    assert told["new_tokens"] == NEW
    spare = 0.0  # equal to the byte, but
    if policy.partition("+")[0] in ("adakv", "duoattention", "kvzip"):
        spare = 0.2  # a bound for heads of unequal counts,
    if policy == "rocketkv-mt" and mode != "full":
        spare = 0.02  # and with a slot for a token that is never fed
    for name, real in (("kv_bytes", "allocated_bytes"), ("state_bytes", "state_bytes")):
        assert held[real] <= told[name] <= (1 + spare) * held[real]
    assert held["host_bytes"] <= told["host_bytes"] <= 1.1 * held["host_bytes"] + 2**14
    assert told["peak_bytes"] > told["weights_bytes"] + held["peak_bytes"]
    assert told["fits"] is True


@pytest.mark.parametrize(
    ("policy", "budget", "appends"),
    [("h2o", "40", 0), ("snapkv+int4", "40", 1), ("h2o+pyramid", "20%", 0), ("pyramidkv", "64", 1)],
)
def test_budgets_are_told_as_tokens_of_each_layer(kvtool, policy, budget, appends):
    given = ("--prompt", PROMPT, "-p", policy, "-b", budget, "-n", str(NEW))
    told, document = foretold(kvtool, "generate", *given), ran(kvtool, "generate", *given)
    kept = document["cache"]["kept_per_layer"]
    assert [tokens + appends * (NEW - 1) for tokens in told["tokens"]] == kept
    assert "reads" not in told


def test_what_is_read_is_told_beside_what_is_stored(kvtool):
    told = foretold(kvtool, "generate", "--prompt", PROMPT, "-p", "quest", "-b", "20%")
    assert told["tokens"] == [told["prompt_tokens"]] * 4
    assert told["reads"] == [told["prompt_tokens"] // 5] * 4
    told = foretold(kvtool, "generate", "--prompt", PROMPT, "-p", "rocketkv", "-b", "64")
    assert 64 < told["tokens"][0] < told["prompt_tokens"]


def test_compress_holds_what_was_told(kvtool):
    for policy in ("snapkv", "roco", "quest", "h2o+int8"):
        given = ("--prompt", PROMPT, "-p", policy, "-b", "64", "--save", "a.st")
        told, document = foretold(kvtool, "compress", *given), ran(kvtool, "compress", *given)
        assert told["prompt_tokens"] == document["prompt_tokens"]
        assert told["kv_bytes"] == document["cache"]["allocated_bytes"]
        assert told["state_bytes"] == document["cache"]["state_bytes"]
    told = foretold(kvtool, "generate", "--cache", "a.st", "--prompt", "Why?", "-n", "4")
    document = ran(kvtool, "generate", "--cache", "a.st", "--prompt", "Why?", "-n", "4")
    assert told["prompt_tokens"] + 3 == document["cache"]["tokens_seen"]


def test_a_plan_is_told_as_it_will_be_obeyed(kvtool):
    made = kvtool("plan-budget", "-b", "48", "-p", "h2o", "--allocator", "pyramid", "-q").out
    Path("plan.yaml").write_text(made)
    given = ("plan.yaml", "--prompt", PROMPT, "-p", "h2o", "-n", str(NEW))
    told, document = foretold(kvtool, "generate", *given), ran(kvtool, "generate", *given)
    assert told["tokens"] == document["cache"]["kept_per_layer"] == document["plan"]["tokens"]
    assert told["kv_bytes"] + told["state_bytes"] == document["plan"]["held"]
    assert told["kv_bytes"] == document["cache"]["allocated_bytes"]


def test_conversations_are_counted_as_one_prompt(kvtool):
    Path("turns.txt").write_text("Where is the lamp?\nAnd the old falcon?\n")
    given = ("--turns", "turns.txt", "-p", "full", "-n", "4")
    told, document = foretold(kvtool, "generate", *given), ran(kvtool, "generate", *given)
    assert told["prompt_tokens"] + 3 == pytest.approx(document["cache"]["tokens_seen"], abs=4)


def test_eval_tells_each_variant(kvtool):
    given = ("-t", "niah", "--lengths", "256", "--samples", "1", "--depths", "50")
    done = kvtool("eval", *given, "-p", "h2o,quest", "-b", "20%", "--dry-run")
    work = yaml.safe_load(done.out)["work"]
    (task,) = work["tasks"]
    assert list(task["memory"]) == ["full", "h2o@20%", "quest@20%"]
    assert work["memory"] == {"device": "cpu", "weights_bytes": weights()}
    for name, told in task["memory"].items():
        assert told["prompt_tokens"] == task["longest_prompt"]
        policy, _, budget = name.partition("@")
        prompt = ("--prompt", text_of(told["prompt_tokens"]), "-p", policy)
        size = ("-b", budget) if budget else ()
        document = ran(kvtool, "generate", *prompt, *size, "-n", str(told["new_tokens"]))
        assert document["prompt_tokens"] == told["prompt_tokens"]
        assert told["kv_bytes"] == document["cache"]["allocated_bytes"]
        assert told["state_bytes"] == document["cache"]["state_bytes"]
    (line,) = [line for line in done.err.splitlines() if line.startswith("memory: ")]
    assert " on niah: fits, about " in line
    assert line.endswith(" free on cpu")


def test_caches_of_shared_prompts_are_there_together(kvtool):
    given = ("-t", "niah,ppl", "--lengths", "256", "--samples", "1", "-p", "h2o,quest", "-b", "64")
    alone, shared = (
        yaml.safe_load(kvtool("eval", *given, "--dry-run", *more).out)["work"]["tasks"]
        for more in ((), ("--shared-prefill",))
    )
    needles = alone[0]["memory"]
    held = {name: told["kv_bytes"] + told["state_bytes"] for name, told in needles.items()}
    for name, told in shared[0]["memory"].items():
        others = sum(held.values()) - held[name]
        assert told["peak_bytes"] == needles[name]["peak_bytes"] + others
    assert shared[1] == alone[1]  # a text that is followed is read by each variant alone


def text_of(tokens):
    """A text of a number of tokens, the first of which begins every text."""
    tokenizer = load().tokenizer
    return tokenizer.decode(tokenizer(write_needle()[0])["input_ids"][1:tokens])


def weights():
    model = load().model
    return sum(
        each.numel() * each.element_size() for each in [*model.parameters(), *model.buffers()]
    )


@pytest.fixture
def llama(kvtool, tmp_path):
    """Llama 3.1 8B without its weights."""
    from kvtool.models.reference import path

    folder = tmp_path / "llama"
    folder.mkdir()
    for file in path().iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(LLAMA_3))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_model_that_does_not_fit_is_said_so_in_words(kvtool, llama, monkeypatch):
    given = ("-m", "llama", "--prompt", PROMPT, "-p", "h2o", "-b", "64", "--dtype", "bfloat16")
    for free, fits in ((10 * 2**30, False), (40 * 2**30, True), (None, None)):
        monkeypatch.setattr("kvtool.models.placement._free_ram", lambda free=free: free)
        done = kvtool("generate", *given, "--dry-run")
        assert done.code == 0
        told = yaml.safe_load(done.out)["memory"]
        assert told["fits"] is fits
        assert told["weights_bytes"] == pytest.approx(8_030_261_248 * 2, rel=1e-6)
        verdict = {False: "does not fit", True: "fits", None: "may fit"}[fits]
        assert f"memory: {verdict}, about 15." in done.err
        size = {False: "10.0 GiB", True: "40.0 GiB", None: "an unknown size"}[fits]
        assert f"weights 15.0 GiB; {size} free on cpu\n" in done.err
    (layer, *_) = layer_shapes(load_config("llama"), "bfloat16")
    assert told["kv_bytes"] == 32 * 65 * layer.bytes


def test_quantised_weights_are_not_guessed(kvtool, llama):
    config = LLAMA_3 | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (llama / "config.json").write_text(json.dumps(config))
    done = kvtool("generate", "-m", "llama", "--prompt", PROMPT, "--dry-run")
    told = yaml.safe_load(done.out)["memory"]
    assert (told["weights_bytes"], told["peak_bytes"], told["fits"]) == (None, None, None)
    assert "and quantised weights; weights of unknown size; " in done.err


def test_what_a_run_would_refuse_is_refused(kvtool):
    given = ("--prompt", PROMPT, "-p", "snapkv", "-b", "10%", "-n", "4")
    dry, done = kvtool("generate", *given, "--dry-run"), kvtool("generate", *given)
    assert (dry.code, done.code) == (2, 2)
    assert dry.err.splitlines()[-1] == done.err.splitlines()[-1]


def test_a_model_that_cannot_be_read_is_not_foretold(kvtool, llama):
    (llama / "tokenizer.json").write_text("{")
    done = kvtool("generate", "-m", "llama", "--prompt", PROMPT, "--dry-run")
    assert done.code == 0
    assert yaml.safe_load(done.out)["memory"] is None
    assert "memory: unknown, the model's configuration or tokenizer cannot be read\n" in done.err


def test_the_same_is_told_whenever_it_is_asked(kvtool, monkeypatch):
    given = ("generate", "--prompt", PROMPT, "-p", "h2o", "--dry-run")
    before = kvtool(*given).out
    monkeypatch.setattr("kvtool.models.placement._free_ram", lambda: 2**40)
    assert kvtool(*given).out == before
    assert "]  # per layer and KV head\n" in before


def test_no_weights_are_loaded(kvtool, monkeypatch):
    monkeypatch.setattr("kvtool.models.attached.load", None)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    prompt, _ = write_needle()
    assert foretold(kvtool, "generate", "--prompt", prompt, "-p", "h2o")["weights_bytes"] > 0
    given = ("-p", "h2o", "-b", "64", "--save", "a.st")
    assert foretold(kvtool, "compress", "--prompt", prompt, *given)["weights_bytes"] > 0


@pytest.mark.parametrize("command", ["generate", "compress"])
def test_a_terminal_is_told_of_the_memory_once_in_words(at_terminal, command):
    own = ["--save", "a.kv.safetensors"] if command == "compress" else []
    arguments = [command, "-p", "h2o", "-b", "16", "--prompt", "x", *own, "--dry-run"]
    done = at_terminal(*arguments)
    assert done.code == 0
    assert "memory" not in done.out
    assert done.err.count("memory: fits, ") == 1
    assert "peak_bytes: " in at_terminal(*arguments, "-q").out
