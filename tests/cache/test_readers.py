"""Sparse readers on models: against slow twins, in padded batches, turns, files, families."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import kvtool
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.features.sparse_tables import Entries
from kvtool.generation import decode_step, prefill
from kvtool.maths.estimates import moments, principal_components
from kvtool.policies.parts import Read
from kvtool.policies.policy import Policy
from kvtool.policies.read.quest import Quest
from kvtool.policies.read.rows import PerRow
from kvtool.policies.read.view import Choice
from tests.models_for_tests import (
    HOOKED,
    anchored_model,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference import readers
from tests.reference.reading import ReadingOracle

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTH, BUDGET, NEW = 61, 24, 9
READERS = [
    "exact-topk",
    "exact-topk(scope=group)",
    "quest",
    "quest(page=3)",
    "sparq",
    "sparq(local=4)",
    "sparq(r=5,reallocate=false)",
    "loki",
    "loki(d=4)",
    "hsa",
    "hsa(page=4,k1=7)",
]


def slow_reader(policy, budget):
    """The slow twin of a policy's reader with the sizes that a budget gives it."""
    read = kvtool.parse_policy(policy).read
    k = read.k or (budget if read.name == "exact-topk" else budget // 2)

    def make(tokens, keys, seen):
        share = max(1, round(keys.shape[1] * budget / tokens))
        if read.name == "exact-topk":
            return readers.ExactTopK(k, read.scope, budget)
        if read.name == "quest":
            return readers.Quest(read.page or math.ceil(2 * tokens / budget), k, budget)
        if read.name == "sparq":
            return readers.SparQ(read.r or share, k, read.local, read.reallocate, budget)
        if read.name == "loki":
            basis = principal_components(moments(keys))[1].T[: read.d or share].tolist()
            return readers.Loki(basis, k, read.scope, budget)
        ratio = max(1.0, tokens / budget)  # HSA alone: RocketKV without its first stage
        page = math.ceil(math.sqrt(ratio))
        page = 1 if page > ratio else page
        k1 = int(keys.shape[1] * page / ratio)
        return readers.HSA(read.page or page, read.k1 or k1, k, budget)

    return make


class Run:
    """A kvtool cache on a model, fed prompts and tokens."""

    def __init__(self, model, policy, budget, ids, mode="full"):
        self.model = kvtool.attach(model)
        self.cache = kvtool.build_cache(model, policy, budget, prefill=mode)
        self.logits = self.turn(ids)

    def turn(self, ids):
        self.logits = prefill(self.model, self.cache, torch.tensor([ids]))[0]
        return self.logits

    def feed(self, token):
        self.logits = decode_step(self.model, self.cache, torch.tensor([token]))[0]
        return self.logits


def follow(run, oracle, logits, steps):
    for _ in range(steps):
        torch.testing.assert_close(run.logits, logits, atol=1e-4, rtol=1e-4)
        token = int(logits.argmax())
        kvtool.detach(run.model)
        logits = oracle.feed([token])
        kvtool.attach(run.model)
        run.feed(token)
    torch.testing.assert_close(run.logits, logits, atol=1e-4, rtol=1e-4)


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "policy"), list(zip(itertools.cycle(["llama", "qwen3"]), READERS, strict=False))
)
def test_a_reader_equals_its_slow_twin(model, policy):
    oracle = ReadingOracle(model, slow_reader(policy, BUDGET))
    logits = oracle.turn(prompt(LENGTH))
    mode = "full" if "page" in policy else "block:16"
    follow(Run(model, policy, BUDGET, prompt(LENGTH), mode), oracle, logits, NEW)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("policy", ["quest", "sparq", "loki", "hsa"])
def test_a_second_turn_makes_its_own_sizes(model, policy):
    oracle = ReadingOracle(model, slow_reader(policy, BUDGET))
    run = Run(model, policy, BUDGET, prompt(LENGTH))
    follow(run, oracle, oracle.turn(prompt(LENGTH)), 3)
    turn = prompt(30, seed=5)
    kvtool.detach(model)
    logits = oracle.turn(turn)
    kvtool.attach(model)
    run.turn(turn)
    follow(run, oracle, logits, 6)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize(
    ("policy", "length"),
    [("quest", 23), ("exact-topk", 24), ("sparq", 24), ("hsa", 25), ("loki", 23), ("loki", 1)],
)
def test_prompts_around_the_budget(model, policy, length):
    """What fits is read in full, until what is generated no longer does."""
    oracle = ReadingOracle(model, slow_reader(policy, BUDGET))
    logits = oracle.turn(prompt(length, seed=2))
    follow(Run(model, policy, BUDGET, prompt(length, seed=2)), oracle, logits, max(4, 27 - length))


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["quest", "hsa"])
def test_first_layers_may_be_read_in_full(model, policy):
    oracle = ReadingOracle(model, slow_reader(policy, BUDGET), skip_layers=2)
    logits = oracle.turn(prompt(LENGTH))
    run = Run(model, f"{policy}(skip_layers=2)", BUDGET, prompt(LENGTH))
    follow(run, oracle, logits, 4)
    assert run.cache.layers[1].pairs_read == LENGTH + 4
    assert run.cache.layers[2].pairs_read != LENGTH + 4


def decoded(model, cache, ids, tokens, mask=None):
    logits = [prefill(model, cache, ids, mask)]
    logits += [decode_step(model, cache, step) for step in tokens]
    return torch.stack(logits)


LENGTHS = (60, 37, 11)


def ragged():
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(len(rows), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    return ids, mask, rows


def test_a_row_left_out_among_decoded_tokens_is_refused():
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, _ = ragged()
    cache = kvtool.build_cache(model, "quest", 20)
    model(ids, attention_mask=mask, past_key_values=cache)
    mask = torch.cat([mask, torch.tensor([[1], [0], [1]])], 1)
    with pytest.raises(kvtool.KvtoolError, match="cannot leave out a row among decoded tokens"):
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)


@dataclass(frozen=True)
class Newest(Read):
    """A reader from outside that knows rows of one length only: it reads the newest tokens."""

    k: int = 8

    name: ClassVar = "newest"

    def sized(self, step):
        return self

    def choose(self, view):
        newest = torch.arange(view.tokens - self.k, view.tokens)
        return Choice(newest.expand(*view.query.shape[:2], -1))


class Oldest(Quest):
    """A reader from outside that takes over all of `quest` but its choice."""

    def choose(self, view):
        return Choice(torch.arange(8).expand(*view.query.shape[:2], -1))


@pytest.mark.parametrize("reader", [Newest(), Oldest(page=4, k=8)])
def test_a_reader_of_rows_of_one_length_reads_them_one_by_one(reader):
    model = peaky_model("llama")
    policy = replace(kvtool.parse_policy("exact-topk"), read=reader)
    ids, mask, rows = ragged()
    new = random_ids(6, batch=len(rows), seed=9)
    both = kvtool.build_cache(model, policy, BUDGET)
    together = decoded(model, both, ids, new.T, mask)
    assert [len(SparseIndex.of(layer).entries) for layer in both.slot_layers] == [len(rows)] * 2
    for i, row in enumerate(rows):
        own = kvtool.build_cache(model, policy, BUDGET)
        alone = decoded(model, own, row, new[i : i + 1].T)
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=2e-4, rtol=1e-4)


def test_a_row_that_chooses_from_all_it_holds_has_room_beside_a_row_that_does_not():
    """Both store 6 of 8 tokens; one has 2 of them to choose from, the other all."""
    reader = Quest(page=2, k=2)
    alone = [
        Entries(
            slice(row, row + 1),
            [reader],
            prompts=[6],
            budget=PerRow.one(9),
            stored=PerRow.one(6),
            tokens=PerRow.one(tokens),
            index=torch.arange(tokens).expand(1, 1, -1),
        )
        for row, tokens in enumerate((2, 6))
    ]
    both = Entries.side_by_side(alone, torch.device("cpu"))
    keys = torch.arange(16.0).view(2, 1, 8, 1)
    for _ in range(2):
        both.append(keys, keys)
    assert both.tokens.known == [4, 8]
    assert both.candidates(keys)[0, 0, :4, 0].tolist() == [0, 1, 6, 7]
    assert both.candidates(keys)[1, 0, :, 0].tolist() == [*range(8, 16)]


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["exact-topk", "quest", "sparq", "loki", "hsa"])
def test_tables_follow_the_slots(policy):
    """After any number of tokens the tables are those that would be made of the slots."""
    model = kvtool.attach(peaky_model("llama"))
    for batch, mask in ((2, None), (3, ragged()[1])):
        ids = ragged()[0] if mask is not None else random_ids(50, batch=batch)
        cache = kvtool.build_cache(model, policy, 20)
        prefill(model, cache, ids, mask)
        for step in range(13):
            decode_step(model, cache, random_ids(batch, seed=step)[0])
        for layer in cache.layers:
            for reading in SparseIndex.of(layer).entries:
                kept = dict(reading.tables)
                reading.build(layer.keys[reading.rows], layer.values[reading.rows])
                if mask is not None:
                    rows_alone = zip(reading.readers, reading.tokens.known, strict=True)
                    for row, (reader, tokens) in enumerate(rows_alone):
                        for name, count in reader.columns(tokens).items():
                            made = reading.tables[name][row, ..., :count]
                            old = kept[name][row, ..., :count]
                            torch.testing.assert_close(old, made, atol=1e-5, rtol=1e-4)
                    continue
                columns = reading.readers[0].columns(reading.tokens.most)
                room = reading.tokens.most + layer.keys.shape[2] - reading.stored.most
                most = reading.readers[0].columns(
                    room
                )  # for the tokens that the buffers have slots for
                for name, table in reading.tables.items():
                    old = kept[name]
                    if name in columns:
                        old = old[..., : columns[name]]
                        assert kept[name].shape[-1] <= most[name]
                    torch.testing.assert_close(old, table, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["quest", "loki"])
def test_tables_are_not_made_anew_at_a_step(policy, monkeypatch):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, policy, 20)
    prefill(model, cache, random_ids(50))
    reader = type(SparseIndex.of(cache.layers[0]).entries[0].readers[0])
    made = []
    monkeypatch.setattr(reader, "start", lambda self, stored: made.append(1))
    for token in random_ids(8, seed=1)[0]:
        decode_step(model, cache, token[None])
    assert not made


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", torch.float32),
        ("gemma3", torch.float32),
        ("gpt_oss", torch.bfloat16),
        ("mistral-window", torch.float32),
        ("falcon_h1", torch.float32),
        ("lfm2", torch.bfloat16),
    ],
)
def test_families_with_attention_of_their_own(family, dtype):
    """A budget that fits is the full cache; a small one is finite, and the kernels agree."""
    model = family_model(family).to(dtype)
    ids, new = random_ids(60), random_ids(3, seed=1).T
    outputs = {}
    for kernel in ("eager",) if family in ("gemma2", "gpt_oss") else ("eager", "sdpa"):
        kvtool.detach(model)
        model.set_attn_implementation(kernel)
        kvtool.attach(model)
        full = decoded(model, kvtool.build_cache(model, "full"), ids, new)
        for policy in ("exact-topk(k=63)", "quest", "sparq", "loki", "hsa"):
            fits = kvtool.build_cache(model, policy, 512)
            torch.testing.assert_close(decoded(model, fits, ids, new), full)
            small = decoded(model, kvtool.build_cache(model, policy, 20), ids, new)
            assert small.isfinite().all()
            outputs.setdefault(policy, []).append(small)
    kvtool.detach(model)
    if dtype is torch.float32:
        for found in outputs.values():
            torch.testing.assert_close(found[0], found[-1], atol=1e-3, rtol=1e-3)


def test_softcaps_and_sinks_take_part():
    """Exact top-k of all tokens but the least attended one is nearly the full cache."""
    for family in ("gemma2", "gpt_oss"):
        model = kvtool.attach(family_model(family))
        ids, new = random_ids(60), random_ids(6, seed=1).T
        full = decoded(model, kvtool.build_cache(model, "full"), ids, new)
        near = kvtool.build_cache(model, "exact-topk(k=59)", 59)
        torch.testing.assert_close(decoded(model, near, ids, new), full, atol=0.15, rtol=0.05)


@pytest.mark.parametrize("family", HOOKED)
def test_stock_eager_attention_is_refused(family):
    model = kvtool.attach(family_model(family))
    cache = kvtool.build_cache(model, "quest", 20)
    with pytest.raises(kvtool.KvtoolError, match=f"the own attention of `{family}` always reads"):
        prefill(model, cache, random_ids(30))


def test_latent_attention_is_refused():
    model = kvtool.attach(family_model("deepseek_v3"))
    cache = kvtool.build_cache(model, "quest", 20)
    with pytest.raises(
        kvtool.KvtoolError, match="`quest` needs keys that are stored as they are attended"
    ):
        prefill(model, cache, random_ids(30))


def test_a_reader_goes_on_a_score_that_cuts_prompts(tmp_path):
    snapkv = kvtool.parse_policy("snapkv(window=4)").score
    quest = kvtool.parse_policy("quest(page=2,k=6)").read
    policy = Policy(snapkv, read=quest)
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, policy, 30)
    decoded(model, cache, random_ids(60), random_ids(5, seed=1).T)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert loaded.policy == policy
    step = torch.tensor([5])
    after = decode_step(model, cache.copy(), step)
    torch.testing.assert_close(decode_step(model, loaded, step), after, atol=1e-5, rtol=1e-5)
    report = cache.report()
    assert report.kept_per_layer == [35, 35]
    assert report.traffic_pairs == 18 + 5  # 18 pages, of which 3 are read; the last has one token


def test_combinations_that_make_no_sense():
    quest = kvtool.parse_policy("quest").read

    def score(name):
        return kvtool.parse_policy(name).score

    with pytest.raises(kvtool.UsageError, match="`h2o` writes over slots at every step"):
        Policy(score("h2o"), read=quest)
    with pytest.raises(kvtool.UsageError, match="`quest` needs its own k"):
        Policy(score("snapkv"), read=quest)
    for text in ("h2o+quest", "full+sparq", "quest+hsa"):
        with pytest.raises(kvtool.UsageError, match="is a base policy and cannot modify"):
            kvtool.parse_policy(text)
    for text in ("quest+caote", "exact-topk+uniform", "loki+pyramid"):
        with pytest.raises(kvtool.UsageError, match="chooses what is read"):
            kvtool.parse_policy(text)


def test_budgets_too_small_are_refused():
    model = kvtool.attach(peaky_model("llama"))
    with pytest.raises(kvtool.UsageError, match="quest needs a budget of 2 or more, got 1"):
        kvtool.build_cache(model, "quest", 1)
    with pytest.raises(kvtool.UsageError, match="hsa needs a budget of 16 or more, got 15"):
        kvtool.build_cache(model, "hsa", 15)
    cache = kvtool.build_cache(model, "hsa", "20%")
    with pytest.raises(kvtool.UsageError, match="20% of 50 tokens: hsa needs a budget of 16"):
        prefill(model, cache, random_ids(50))
    with pytest.raises(kvtool.UsageError, match="policy `quest` needs a budget"):
        kvtool.build_cache(model, "quest")


def test_traffic_is_what_the_formulas_say():
    """Per KV head, in pairs of key and value, 81 tokens at the last step."""
    model = kvtool.attach(peaky_model("llama"))
    ids, new, tokens, dim = random_ids(60), random_ids(21, seed=1).T, 81, 16

    def traffic(policy, budget=20):
        cache = kvtool.build_cache(model, policy, None if policy == "full" else budget)
        decoded(model, cache, ids, new)
        report = cache.report()
        per_pair = 2 * dim * 4 * 2 * 2
        assert report.traffic_bytes == round(report.traffic_pairs * per_pair)
        return report.traffic_pairs

    assert traffic("full") == tokens
    assert traffic("h2o") == 20 + 1
    assert traffic("snapkv(window=4)") == 20 + 21
    assert traffic("exact-topk") == 4 * 20  # each of the group's heads its own
    assert traffic("exact-topk(scope=group)") == 20
    assert traffic("quest") == math.ceil(81 / 6) + 2 * 6 + 3  # the last page has 3 tokens
    assert traffic("quest(page=3)") == 27 + 3 * 3
    assert traffic("sparq(r=5)") == tokens * 5 / (2 * dim) + 10 + 0.5
    assert traffic("loki(d=4)") == tokens * 4 / (2 * dim) + 10
    # HSA: c2 = 60 / 20 = 3, pages of 2, 16 * 2 / 3 channels
    assert traffic("hsa") == math.ceil(81 / 2) * 10 / (2 * dim) + 10


def test_tables_count_as_state():
    model = kvtool.attach(peaky_model("llama"))

    def state(policy):
        cache = kvtool.build_cache(model, policy, None if policy == "full" else 20)
        prefill(model, cache, random_ids(60))
        return cache.report().state_bytes

    plain, heads = state("full"), 2 * 2
    assert state("exact-topk") == plain
    assert state("quest") == plain + heads * 2 * 16 * 10 * 4  # 10 pages of 6
    assert state("sparq") == plain + heads * (16 * 60 + 16) * 4
    assert state("loki(d=4)") == plain + heads * (4 * 60 + 4 * 16) * 4
    assert state("hsa") == plain + heads * 2 * 16 * 30 * 4  # 30 pages of 2


def test_a_file_of_bases_is_used_and_checked(tmp_path):
    from safetensors.torch import save_file

    model = kvtool.attach(peaky_model("llama"))
    bases = torch.eye(16).expand(2, 2, 16, 16).contiguous()
    save_file({"key_basis": bases}, tmp_path / "Basis.safetensors")
    policy = f"loki(d=4,basis={tmp_path / 'Basis.safetensors'})"
    cache = kvtool.build_cache(model, policy, 20)
    prefill(model, cache, random_ids(50))
    reading = SparseIndex.of(cache.layers[0]).entries[0]
    keys = cache.layers[0].keys[:, :, : reading.tokens.most]
    torch.testing.assert_close(reading.tables["components"], keys[..., :4].transpose(2, 3))
    save_file({"key_basis": bases[:1]}, tmp_path / "Basis.safetensors")
    with pytest.raises(kvtool.UsageError, match="holds no key basis for layer 1"):
        prefill(model, kvtool.build_cache(model, policy, 20), random_ids(50))
    with pytest.raises(kvtool.UsageError, match="no file of key bases at `nowhere`"):
        kvtool.build_cache(model, "loki(basis=nowhere)", 20)
    save_file({"other": bases}, tmp_path / "Basis.safetensors")
    with pytest.raises(kvtool.UsageError, match="holds no `key_basis`"):
        kvtool.build_cache(model, policy, 20)
