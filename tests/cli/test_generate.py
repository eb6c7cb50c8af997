import json
import shutil

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from kvtool.documents.generation import GenerationDocument
from kvtool.models import reference
from kvtool.models.reference.tasks import needle_prompt

PROMPT = "The old lamp was near the school. The quiet falcon was behind the"


def generate(kvtool, *arguments, **more):
    """Run quietly and return the document."""
    done = kvtool("generate", "-q", "-f", "json", *arguments, **more)
    assert (done.code, done.err) == (0, "")
    return GenerationDocument(**json.loads(done.out))


def test_the_document_says_what_was_held(kvtool):
    document = generate(kvtool, "--prompt", PROMPT, "-p", "h2o+caote", "-b", "8", "-n", "5")
    assert (document.model, document.policy, document.budget) == ("reference", "h2o+caote", 8)
    assert (document.new_tokens, len(document.token_ids)) == (5, 5)
    assert document.cache.tokens_seen == document.prompt_tokens + 4
    assert document.cache.kept_per_layer == [8] * 4
    assert document.cache.kv_bytes == 8 * 4 * 2 * 32 * 2 * 4  # slots layers heads dim k+v float32
    assert document.timing.decode_tokens_per_s > 0
    assert document.fidelity is None


def test_policy_strings_are_printed_canonically(kvtool):
    document = generate(kvtool, "--prompt", PROMPT, "-p", "H2O( recent=2 )", "-b", "50%", "-n", "1")
    assert (document.policy, document.budget) == ("h2o(recent=2)", "50%")
    assert document.cache.kept_per_layer == [document.prompt_tokens // 2] * 4


def test_without_a_policy_everything_is_kept(kvtool):
    document = generate(kvtool, "--prompt", PROMPT, "-n", "3")
    assert (document.policy, document.budget) == ("full", None)
    assert document.cache.kept_per_layer == [document.prompt_tokens + 2] * 4


def test_the_budget_of_a_policy_that_keeps_everything_is_said_to_be_useless(kvtool):
    done = kvtool("generate", "--prompt", PROMPT, "-p", "full", "-b", "9", "-n", "2")
    assert done.code == 0
    assert "policy `full` keeps everything; --budget 9 has no effect" in done.err


def test_a_budget_above_the_length_gives_the_full_caches_tokens(kvtool):
    full = generate(kvtool, "--prompt", PROMPT, "-n", "12")
    for policy in ("h2o+caote", "snapkv", "streaming"):
        roomy = generate(kvtool, "--prompt", PROMPT, "-n", "12", "-p", policy, "-b", "1K")
        assert roomy.token_ids == full.token_ids


def test_prompts_come_from_files_and_stdin(kvtool, tmp_path):
    (tmp_path / "prompt.txt").write_text(f"{PROMPT}\n")
    typed = generate(kvtool, "--prompt", PROMPT, "-n", "4")
    read = generate(kvtool, "--prompt-file", "prompt.txt", "-n", "4")
    piped = generate(kvtool, "--prompt-file", "-", "-n", "4", stdin=PROMPT.encode())
    assert typed.token_ids == read.token_ids == piped.token_ids


def test_formats(kvtool, tmp_path):
    options = ["generate", "-q", "--prompt", PROMPT, "-n", "3"]
    text = kvtool(*options).out
    assert yaml.safe_load(kvtool(*options, "-f", "yaml").out)["text"] == text.removesuffix("\n")
    for name in ("a.json", "a.yaml"):
        assert kvtool(*options, "-o", name).out == ""
        data = yaml.safe_load((tmp_path / name).read_text())
        assert GenerationDocument(**data).text == text.removesuffix("\n")
    kvtool(*options, "-o", "a.txt")
    assert (tmp_path / "a.txt").read_text() == text
    assert kvtool(*options, "-o", "-").out == text


def test_what_is_set_aside_is_told(kvtool):
    options = ["--prompt", PROMPT, "-b", "8", "-n", "5"]
    plain = generate(kvtool, *options, "-p", "snapkv(window=4)").cache
    assert (plain.host_bytes, plain.recompute_frequency) == (0, None)
    cache = generate(kvtool, *options, "-p", "snapkv(window=4)+calidrop").cache
    aside = cache.tokens_seen - 4 - 8
    assert cache.host_bytes == aside * 4 * 2 * (32 * 2 * 4 + 4)  # layers, heads, pair and position
    assert cache.kv_bytes == plain.kv_bytes
    assert len(cache.recompute_frequency) == 4
    assert all(0 <= share <= 1 for share in cache.recompute_frequency)


def test_sampling_follows_the_seed(kvtool):
    options = ["--prompt", PROMPT, "-n", "12", "--temperature", "1.5"]
    first = generate(kvtool, *options, "--seed", "1")
    assert generate(kvtool, *options, "--seed", "1").token_ids == first.token_ids
    assert generate(kvtool, *options, "--seed", "2").token_ids != first.token_ids


def test_blocks_bound_the_peak(kvtool):
    prompt, _ = needle_prompt(tokens=600, seed=1)
    options = ["--prompt", prompt, "-p", "streaming", "-b", "64", "-n", "2"]
    whole = generate(kvtool, *options)
    blocks = generate(kvtool, *options, "--prefill", "block:32")
    assert blocks.cache.kept_per_layer == whole.cache.kept_per_layer == [64] * 4
    assert blocks.cache.peak_bytes < whole.cache.peak_bytes
    assert whole.cache.peak_bytes < whole.cache.full_bytes


def test_compare_full(kvtool):
    options = ["--prompt", PROMPT, "-n", "10", "--compare-full", "-p", "streaming"]
    roomy, tight = (generate(kvtool, *options, "-b", size).fidelity for size in ("1K", "5"))
    assert (roomy.agreement, roomy.first_divergence) == (1.0, None)
    assert roomy.kl == pytest.approx(0, abs=1e-5)
    assert tight.kl > 0.01
    done = kvtool("generate", "--prompt", PROMPT, "-n", "4", "--compare-full")
    assert "full cache: 100.0% of tokens agree" in done.err


def test_any_text_goes_in(kvtool):
    document = generate(kvtool, "--prompt", "Ünï\tcödé 漢字 🙂\r\n\x00 end", "-n", "2")
    assert document.prompt_tokens > 20


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("mistral", {"sliding_window": 16}, "slide over a window of 16 tokens"),
        ("falcon", {"alibi": False}, "its own eager attention"),
    ],
)
def test_what_a_family_limits_is_said_on_stderr(kvtool, tmp_path, family, settings, said):
    config = AutoConfig.for_model(
        family,
        vocab_size=1195,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        **settings,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference.path() / name, tmp_path)
    options = ["-p", "h2o", "-b", "8", "--prompt", PROMPT, "-n", "2"]
    done = kvtool("generate", "-m", str(tmp_path), *options)
    assert done.code == 0
    assert said in done.err
    assert said not in done.out


NEEDLE = "The secret code for falcon: 7429103. The old lamp was near the school."


@pytest.mark.parametrize(
    ("command", "size", "handful"),
    [
        ("compress", "15", 15),
        ("generate", "16", None),
        ("generate", "20%", 4),
        ("compress", "8KiB", 2),
        ("compress", "64MiB", None),
    ],
)
def test_a_budget_of_a_handful_of_tokens_is_noted(kvtool, command, size, handful):
    more = ("-n", "2") if command == "generate" else ("--save", "a.st")
    done = kvtool(command, "--prompt", NEEDLE, "-p", "h2o", "-b", size, *more)
    assert done.code == 0
    notes = [line for line in done.err.splitlines() if "handful" in line]
    told = f"note: {handful} tokens are a handful; what comes of so few makes little sense"
    assert notes == ([told] if handful else [])


def test_eval_notes_its_smallest_budget_if_it_is_a_handful(kvtool):
    options = ["eval", "-t", "niah", "--lengths", "256", "-L", "1", "-p", "h2o", "--dry-run"]
    assert "note: 9 tokens are a handful" in kvtool(*options, "-b", "64,9").err
    assert "handful" not in kvtool(*options, "-b", "64").err
