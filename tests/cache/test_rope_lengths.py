"""RoPE that depends on the length of the text: one choice of factors for all of a text."""

import copy
import json
import threading

import pytest
import torch
from safetensors import safe_open

import kvtool
from kvtool.cache.hooks.rope import length_rope
from kvtool.cache.tensor_files.tensor_file import digest_of, write_tensors
from kvtool.cache.whole.batching import append_entries, keep_entries
from kvtool.cache.whole.settings import LengthRope, RopeLengths
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import compress, decode_step, follow, prefill, token_logprobs
from kvtool.generation.fidelity import compare_with_full
from kvtool.generation.graphs import StaticDecoding
from tests.cache.long_ropes import (
    MODELS,
    TRAINED,
    long_rope_model,
    plain_answer,
    plain_logits,
    text,
)
from tests.models_for_tests import instructed, peaky_model

NAMES = list(MODELS)
SHORT, LONG = (
    "phi3 longrope",
    "llama dynamic",
)  # a model that drops its cache, and one that does not
close = {"atol": 2e-5, "rtol": 1e-4}


def logits_of(name, ids, length, prompt, prefill_by="full", policy="full", budget=None):
    """All logits from the prompt's last on, the other tokens decoded one by one."""
    model = long_rope_model(name)
    cache = kvtool.build_cache(model, policy, budget, prefill=prefill_by)
    cache.expect_length(length)
    first = prefill(model, cache, ids[:, :prompt])
    rest = torch.cat([ids[:, prompt:], ids[:, -1:]], 1)
    return follow(model, cache, first, rest)[0], cache


# ---- lengths


def test_lengths_that_share_their_factors_have_one_name():
    long, dynamic = LengthRope((64,), grows=False), LengthRope((64,), grows=True)
    assert [long.factors_for(n) for n in (1, 64, 65, 999)] == [64, 64, 65, 65]
    assert [dynamic.factors_for(n) for n in (1, 64, 65, 999)] == [64, 64, 65, 999]
    assert LengthRope((32, 64), grows=False).factors_for(40) == 64
    assert long.serve(64, 64)
    assert not long.serve(64, 65)
    assert long.serve(65, 10)
    assert long.serve(65, 999)
    assert not dynamic.serve(100, 101)
    assert dynamic.serve(100, 70)


def test_lengths_follow_their_batch_entries():
    lengths = RopeLengths.of([64, 65, 64])
    assert lengths.reindexed(lambda rows: rows[torch.tensor([1, 2])]).lengths == (65, 64)
    assert lengths.reindexed(lambda rows: rows[torch.tensor([0, 2])]).lengths == (64,)
    assert RopeLengths.of([65, 65]).of_entries(3) == [65, 65, 65]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_says_how_its_rope_depends_on_the_length(name):
    assert length_rope(long_rope_model(name)) == LengthRope((TRAINED,), "dynamic" in name)


def test_other_models_have_no_hooks_for_it():
    model = peaky_model("llama")
    assert length_rope(model) is None
    cache = kvtool.build_cache(model, "full")
    model(input_ids=text(9), past_key_values=cache)
    assert cache.rope.chosen is None
    assert not model.model.rotary_emb._forward_hooks


# ---- one choice for a whole text, as one plain forward makes it


CROSSING, ANNOUNCED = (40, 80, 80), (60, 64, 65)
"""Tokens of a prompt, of it and those behind it, and of the text that is announced."""


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "prefill_by", "prompt", "tokens", "length"),
    [
        (SHORT, "block:16", *CROSSING),
        (SHORT, "full", 60, 64, 64),
        (SHORT, "full", 40, 50, 50),
        (LONG, "full", *ANNOUNCED),
        (LONG, "block:16", 60, 64, 64),
        (LONG, "block:16", 30, 34, 120),
        ("gemma3 dynamic", "full", *CROSSING),
        ("gemma3 longrope", "block:16", *ANNOUNCED),
        ("phimoe longrope", "full", 90, 100, 100),
        ("llama longrope", "full", *ANNOUNCED),
        ("deepseek dynamic", "block:16", *CROSSING),
        ("falcon dynamic", "block:16", *CROSSING),
        ("falcon dynamic", "full", *ANNOUNCED),
    ],
)
def test_full_equals_one_plain_forward(name, prefill_by, prompt, tokens, length):
    ids = text(tokens)
    logits, _ = logits_of(name, ids, length, prompt, prefill_by)
    wanted = plain_logits(name, ids, length)[0, prompt - 1 :]
    torch.testing.assert_close(logits, wanted, **close)
    if length > TRAINED:
        other = plain_logits(name, ids[:, :TRAINED], TRAINED)[0, prompt - 1 : TRAINED]
        if len(other):
            assert (logits[: len(other)] - other[: len(logits)]).abs().max() > 0.01


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [SHORT, LONG, "deepseek dynamic"])
def test_a_plain_forward_chooses_for_itself(name):
    """The caller announces nothing, so the text that is there counts."""
    model, ids = long_rope_model(name), text(80)
    cache = kvtool.build_cache(model, "full")
    logits = model(input_ids=ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, plain_logits(name, ids, 80), **close)


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_a_plain_forward_that_outgrows_the_factors_is_refused(name):
    model, ids = long_rope_model(name), text(80)
    cache = kvtool.build_cache(model, "full")
    model(input_ids=ids[:, :60], past_key_values=cache)
    model(input_ids=ids[:, 60:64], past_key_values=cache)
    with pytest.raises(UsageError, match=r"texts of up to 64 tokens, .* may come to 65") as error:
        model(input_ids=ids[:, 64:65], past_key_values=cache)
    assert "expect_length" in str(error.value)
    assert cache.get_seq_length() == 64
    cache.reset()
    cache.expect_length(80)
    parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(40, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), plain_logits(name, ids, 80), **close)


def first_of(name, ids, new):
    """The first token of an answer of a given greatest length."""
    return plain_logits(name, ids, ids.shape[1] + new)[:, -1].argmax(-1)


class Spelled:
    """The least that a tokenizer has to be."""

    chat_template = None

    def decode(self, ids, **settings):
        return " ".join(map(str, torch.as_tensor(ids).flatten().tolist()))

    def batch_decode(self, rows, **settings):
        return [self.decode(row) for row in rows]


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_the_comparison_with_the_full_cache_has_the_same_factors(name):
    """The answer of one token stays below 64, the 30 that it might have had do not."""
    model, ids = long_rope_model(name), text(50)
    cache = kvtool.build_cache(model, "full")
    stop = [Spelled().decode(first_of(name, ids, 30))]
    done = kvtool.generation.generate(
        model, Spelled(), cache, ids, max_new_tokens=30, compare_full=True, stop=stop
    )
    assert done.new_tokens == 1
    assert done.fidelity.agreement == 1.0
    assert done.fidelity.kl < 1e-6
    logits = torch.zeros(1, 1, 96)
    assert (
        compare_with_full(model, ids, logits).kl
        != compare_with_full(model, ids, logits, RopeLengths((80,) if name == LONG else (65,))).kl
    )


def test_scoring_a_text_chooses_for_all_of_it():
    for name in (SHORT, LONG):
        model, ids = long_rope_model(name), text(80)
        right = plain_logits(name, ids, 80).log_softmax(-1)[:, :-1]
        right = right.gather(-1, ids[:, 1:, None])[..., 0]
        for chunk in (16, 7):
            cache = kvtool.build_cache(model, "full")
            found, _ = token_logprobs(model, cache, ids, chunk=chunk)
            torch.testing.assert_close(found, right, **close)


def test_a_repeated_prompt_is_turned_as_far_as_it_is_read():
    """KVzip reads the prompt again behind itself: 50 tokens twice are more than 64."""
    model, ids = long_rope_model("llama longrope"), text(50)
    cache = instructed(kvtool.build_cache(model, "kvzip", 20))
    prefill(model, cache, ids)
    assert cache.rope.chosen == RopeLengths((TRAINED + 1,))
    fits = instructed(kvtool.build_cache(model, "kvzip", 60))
    logits = prefill(model, fits, ids)
    assert fits.rope.chosen == RopeLengths((TRAINED,))
    torch.testing.assert_close(logits, plain_logits("llama longrope", ids, 50)[:, -1], **close)


# ---- transformers' own generate


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "prompt"),
    [(SHORT, 62), ("gemma3 dynamic", 62), (LONG, 62), ("phimoe longrope", 62), (LONG, 80)],
)
def test_transformers_generate_goes_on_with_its_cache(name, prompt):
    model, ids, new = long_rope_model(name), text(prompt), 5
    cache = kvtool.build_cache(model, "full")
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.past_key_values is cache
    assert cache.get_seq_length() == prompt + new - 1
    assert out.sequences.tolist() == plain_answer(name, ids, new).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "prompt"), [(SHORT, 60), (LONG, 60)])
def test_a_budget_holds_where_the_length_is_crossed(name, prompt):
    model, ids = long_rope_model(name), text(prompt)
    with kvtool.compressed(model, "h2o", budget=24):
        out = model.generate(ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    report = out.past_key_values.report()
    assert report.tokens_seen == prompt + 8
    assert max(report.kept_per_layer) == 24
    other, cache = long_rope_model(name), None
    cache = kvtool.build_cache(other, "h2o", budget=24)
    done = kvtool.generation.generate(other, Spelled(), cache, ids, max_new_tokens=9)
    assert done.input_ids.tolist() == out.sequences.tolist()


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"max_new_tokens": 6}, 66),
        ({"max_length": 66}, 66),
        ({"max_length": 64}, 64),
        ({}, 80),
        ({"max_new_tokens": 6, "max_length": 62}, 66),
        ({"max_new_tokens": 6, "prefill_chunk_size": 16}, 66),
    ],
    ids=["new", "length", "short", "default", "both", "chunks"],
)
def test_the_end_of_a_call_is_that_of_transformers(settings, end):
    model, ids = long_rope_model(SHORT), text(60)
    cache = kvtool.build_cache(model, "full")
    out = model.generate(ids, past_key_values=cache, do_sample=False, **settings)
    assert out.shape[1] == end
    assert cache.rope.chosen == RopeLengths((TRAINED if end <= TRAINED else TRAINED + 1,))
    assert out.tolist() == plain_answer(SHORT, ids, end - 60).tolist()


def test_embeddings_and_settings_of_the_model_count():
    model, ids = long_rope_model(LONG), text(62)
    model.generation_config.max_new_tokens = 6
    embeddings = model.get_input_embeddings()(ids)
    cache = kvtool.build_cache(model, "full")
    out = model.generate(inputs_embeds=embeddings, past_key_values=cache, do_sample=False)
    assert cache.rope.chosen == RopeLengths((68,))
    assert out.tolist() == plain_answer(LONG, ids, 6)[:, 62:].tolist()


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_a_further_call_that_outgrows_the_factors_is_refused_at_its_beginning(name):
    model, ids = long_rope_model(name), text(58)
    cache = kvtool.build_cache(model, "full")
    said = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(UsageError, match="texts of up to 64 tokens, and this text may come to 81"):
        model.generate(said, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert cache.get_seq_length() == 60
    out = model.generate(said, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert out.tolist() == plain_answer(name, ids, 6).tolist()


def test_a_call_that_fails_before_it_has_read_leaves_no_choice():
    model, ids = long_rope_model(SHORT), text(50)
    cache = kvtool.build_cache(model, "full")
    with pytest.raises(ValueError, match="wrong_name"):
        model.generate(ids, past_key_values=cache, max_new_tokens=30, wrong_name=1)
    assert cache.rope.chosen is None


# ---- batches


def padded(rows):
    """Rows of tokens, padded on the left: ids and mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    widths = torch.tensor([row.shape[1] for row in rows])[:, None]
    return ids, (torch.arange(width) >= width - widths).long()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [SHORT, LONG, "gemma3 dynamic", "deepseek dynamic"])
def test_each_row_of_a_padded_batch_has_the_factors_of_its_own_length(name):
    rows = [text(30, seed=1), text(80, seed=2), text(62, seed=4)]
    alone = [plain_answer(name, row, 4)[0, -4:].tolist() for row in rows]
    ids, mask = padded(rows)
    model = long_rope_model(name)
    cache = kvtool.build_cache(model, "full")
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **asked)
    assert out[:, -4:].tolist() == alone
    long = [84, 66] if "dynamic" in name else [TRAINED + 1] * 2
    assert cache.rope.chosen == RopeLengths((TRAINED, *long))
    guessed = kvtool.build_cache(model, "full")
    out = model.generate(ids, past_key_values=guessed, **asked)
    assert out[:, -4:].tolist() == alone
    assert guessed.rope.chosen == cache.rope.chosen


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_rows_that_join_and_leave_a_running_batch_keep_their_factors(name):
    model = long_rope_model(name)
    texts, caches = [text(30, seed=1), text(80, seed=2), text(70, seed=5)], []
    for each in texts:
        caches.append(kvtool.build_cache(model, "full"))
        prefill(model, caches[-1], each, new_tokens=10)
    cache, token = caches[0], torch.tensor([5, 6, 7])
    append_entries(cache, caches[1:])
    right = [
        plain_logits(name, torch.cat([own, own_token.view(1, 1)], 1), own.shape[1] + 10)[0, -1]
        for own, own_token in zip(texts, token, strict=True)
    ]
    with cache.rollback():
        torch.testing.assert_close(decode_step(model, cache, token), torch.stack(right), **close)
    keep_entries(cache, torch.tensor([0, 2]))
    found = decode_step(model, cache, token[[0, 2]])
    torch.testing.assert_close(found, torch.stack([right[0], right[2]]), **close)


# ---- files


def rewritten(path, **metadata):
    """The same file with other metadata, and a checksum that fits; None takes an entry out."""
    with safe_open(path, framework="pt") as file:
        told = dict(file.metadata()) | metadata
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    told = {name: text for name, text in told.items() if text is not None and name != "sha256"}
    told["sha256"] = digest_of(tensors, told)
    write_tensors(path, tensors, told)


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_a_file_says_by_which_factors_its_keys_are_turned(name, tmp_path):
    ids, path = text(60), tmp_path / "a.safetensors"
    model = long_rope_model(name)
    cache = kvtool.build_cache(model, "full")
    cache.expect_length(67)
    compress(model, cache, ids)
    kvtool.save_cache(cache, path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["rope_lengths"] == ("67" if name == LONG else "65")
    other = long_rope_model(name)
    again = kvtool.load_cache(path, other)
    done = kvtool.generation.generate(other, Spelled(), again, None, max_new_tokens=7)
    assert done.input_ids.tolist() == plain_answer(name, ids, 7).tolist()


def test_a_file_for_a_short_text_is_not_gone_on_from_too_far(tmp_path):
    path, model = tmp_path / "a.safetensors", long_rope_model(SHORT)
    cache = kvtool.build_cache(model, "full")
    compress(model, cache, text(50))
    kvtool.save_cache(cache, path)
    again = kvtool.load_cache(path, model)
    for prompt in (None, text(9)):
        with pytest.raises(UsageError, match=r"texts of up to 64 tokens.*larger --max-new-tokens"):
            kvtool.generation.generate(model, Spelled(), again, prompt, max_new_tokens=30)
    assert again.get_seq_length() == 50
    kvtool.generation.generate(model, Spelled(), again, None, max_new_tokens=14)


def test_an_old_file_is_read_where_its_text_is_short(tmp_path):
    path, model = tmp_path / "a.safetensors", long_rope_model(SHORT)
    for tokens in (50, 80):
        cache = kvtool.build_cache(model, "full")
        compress(model, cache, text(tokens))
        kvtool.save_cache(cache, path)
        rewritten(path, rope_lengths=None)
        if tokens == 50:
            assert kvtool.load_cache(path, model).rope.chosen == RopeLengths((TRAINED,))
            continue
        with pytest.raises(KvtoolError, match="does not say which RoPE factors") as error:
            kvtool.load_cache(path, model)
        assert "compress the text anew" in str(error.value)


@pytest.mark.parametrize("told", ["63", "", "1e3", "65,65", "٦٥", "64", "9" * 40])
def test_a_file_with_other_lengths_is_refused(told, tmp_path):
    path, model = tmp_path / "a.safetensors", long_rope_model(SHORT)
    cache = kvtool.build_cache(model, "full")
    compress(model, cache, text(80))
    kvtool.save_cache(cache, path)
    rewritten(path, rope_lengths=told)
    with pytest.raises(KvtoolError, match="is not a sound cache file"):
        kvtool.load_cache(path, model)


def test_a_file_of_another_kind_of_model_names_no_lengths(tmp_path):
    path, model = tmp_path / "a.safetensors", peaky_model("llama")
    cache = kvtool.build_cache(model, "full")
    compress(model, cache, text(20))
    kvtool.save_cache(cache, path)
    rewritten(path, rope_lengths="64")
    with pytest.raises(KvtoolError, match="does not depend on the length"):
        kvtool.load_cache(path, model)


# ---- models are left as they are


def state_of(model):
    rotary = model.model.rotary_emb
    own = {name: each for name, each in vars(rotary).items() if not name.startswith("_")}
    return json.dumps(own, default=str), {n: b.clone() for n, b in rotary.named_buffers()}


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_nothing_of_it_stays_on_the_model(name):
    model, ids = long_rope_model(name), text(60)
    before = state_of(model)
    with kvtool.compressed(model, "h2o", budget=24):
        model.generate(ids, max_new_tokens=7, do_sample=False)
    rotary = model.model.rotary_emb
    assert not rotary._forward_hooks
    assert not rotary._forward_pre_hooks
    assert "prepare_inputs_for_generation" not in vars(model)
    if "dynamic" in name:  # longrope writes its buffer in every forward, with or without kvtool
        after = state_of(model)
        assert after[0] == before[0]
        assert all(torch.equal(after[1][n], each) for n, each in before[1].items())
    plain = model(ids).logits
    torch.testing.assert_close(plain, plain_logits(name, ids, 60), **close)


def test_what_longer_texts_have_left_in_a_model_does_not_count():
    """Dynamic NTK keeps the base of the longest text, until a short one is read."""
    model, ids = long_rope_model(LONG), text(80)
    model(text(150))
    cache = kvtool.build_cache(model, "full")
    found = prefill(model, cache, ids)
    torch.testing.assert_close(found, plain_logits(LONG, ids, 80)[:, -1], **close)


def test_threads_with_texts_of_other_lengths_do_not_meet():
    model = kvtool.attach(long_rope_model(LONG))
    texts, found = {n: text(n) for n in (40, 90, 120)}, {}

    def run(n):
        caches = [kvtool.build_cache(model, "full", prefill="block:8") for _ in range(2)]
        found[n] = torch.stack([prefill(model, cache, texts[n])[0] for cache in caches])

    threads = [threading.Thread(target=run, args=(n,)) for n in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, ids in texts.items():
        right = plain_logits(LONG, ids, n)[:, -1].expand(2, -1)
        torch.testing.assert_close(found[n], right, **close)


def test_a_copy_of_an_attached_model_chooses_for_itself():
    model, ids = kvtool.attach(long_rope_model(SHORT)), text(60)
    model.generate(ids, past_key_values=kvtool.build_cache(model, "full"), max_new_tokens=3)
    other = copy.deepcopy(model)
    cache = kvtool.build_cache(other, "full")
    out = other.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert out.tolist() == plain_answer(SHORT, ids, 8).tolist()
    assert cache.get_seq_length() == 67


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [SHORT, "gemma3 longrope"])
def test_compiled_steps_keep_the_factors(name):
    model, ids = long_rope_model(name), text(80)
    cache = kvtool.build_cache(model, "h2o", 24)
    cache.expect_length(80)
    twin = kvtool.build_cache(model, "h2o", 24)
    twin.expect_length(80)
    for each in (cache, twin):
        prefill(model, each, ids[:, :50])
    step = StaticDecoding(model, 30, backend="eager", compiled=True)
    for token in ids[0, 50:]:
        found = step(model, cache, token.view(1))
        torch.testing.assert_close(found, decode_step(model, twin, token.view(1)), **close)
    assert step.steps.compiled_steps > 20


@pytest.mark.exhaustive
def test_a_model_in_another_dtype_has_copies_of_its_own():
    model, ids = long_rope_model(SHORT), text(50)
    cache = kvtool.build_cache(model, "full")
    prefill(model, cache, ids, new_tokens=30)
    model.double()
    cache = kvtool.build_cache(model, "full")
    found = prefill(model, cache, ids, new_tokens=30)
    right = plain_logits(SHORT, ids, 80)[:, -1]
    torch.testing.assert_close(found, right, **close)
