"""What `kvtool export` writes: transformers continues it as kvtool continues the cache."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

import kvtool
from kvtool.engines.virtual_prompt import export_cache
from kvtool.engines.vllm.format import difference, facts_of, read_exported
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import prefill
from kvtool.models.load import load
from kvtool.policies.grammar import parse_policy
from kvtool.policies.table import ALLOCATORS, BASES
from tests.models_for_tests import family_model, peaky_model, random_ids

BUDGET, TOKENS = 32, 70
FAMILIES = ("llama", "gpt_neox", "gemma3", "qwen3", "phi")
POLICIES = ("snapkv(window=8)", "keydiff", "h2o(positions=cache)", "h2o+int8")


def model_of(family, **changes):
    if family == "phi":
        return peaky_model("phi", partial_rotary_factor=0.5, **changes)
    return family_model(family)


def compressed(model, policy, budget=BUDGET, tokens=TOKENS, **more):
    cache = kvtool.build_cache(model, policy, budget=budget, **more)
    prefill(model, cache, random_ids(tokens))
    return cache


def engine_cache(model, tensors):
    """Transformers' own cache, filled with the slots of an exported file."""
    cache = DynamicCache(config=model.config)
    for i in range(model.config.num_hidden_layers):
        cache.update(tensors[f"layer.{i}.keys"][None], tensors[f"layer.{i}.values"][None], i)
    return cache


@torch.no_grad()
def continued(model, tensors, ids):
    """Logits of tokens that an engine reads behind the slots, one block and then one by one."""
    cache, slots = engine_cache(model, tensors), len(tensors["virtual_ids"])
    found = []
    for start, block in (
        (0, ids[:, :5]),
        *((5 + i, each[:, None]) for i, each in enumerate(ids.T[5:])),
    ):
        place = slots + start + torch.arange(block.shape[1])[None]
        found.append(model(block, past_key_values=cache, position_ids=place).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("family", "policy"),
    [*zip(FAMILIES, [*POLICIES, POLICIES[0]], strict=True), ("gpt_neox", POLICIES[0])],
)
def test_transformers_continues_the_slots_as_kvtool_continues_the_cache(family, policy, tmp_path):
    agrees(model_of(family), policy, tmp_path / "text.safetensors")


@pytest.mark.parametrize("policy", ["recency+int4", "h2o(positions=cache)+int4"])
def test_keys_that_were_rotated_to_be_rounded_are_rotated_back(policy, tmp_path):
    agrees(peaky_model("llama", head_dim=32), policy, tmp_path / "text.safetensors")


def agrees(model, policy, path):
    cache = compressed(model, policy)
    kvtool.export(cache, path)
    question = random_ids(12, seed=5)[:, 1:]
    with cache.budgets.raising(), torch.no_grad():
        ours = model(question, past_key_values=cache).logits
    kvtool.detach(model)
    theirs = continued(model, load_file(path), question)
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@torch.no_grad()
def keys_of(model, tokens, places):
    """The keys of tokens in the first layer, as the model itself rotates them alone."""
    cache = DynamicCache(config=model.config)
    model(tokens[:, None], past_key_values=cache, position_ids=places[:, None])
    return cache.layers[0].keys[:, :, 0]


@pytest.mark.parametrize(
    ("family", "policy"),
    [(name, ("knorm", "recency(positions=cache)")[i % 2]) for i, name in enumerate(FAMILIES)],
)
def test_keys_of_the_first_layer_are_those_of_tokens_at_their_new_places(family, policy):
    model = model_of(family)
    cache = compressed(model, policy)
    keys = export_cache(cache).tensors["layer.0.keys"]
    text, kept = random_ids(TOKENS)[0], cache.kept_positions(0)[0]
    kvtool.detach(model)
    first = BUDGET - kept.shape[1]  # a layer with a window has empty slots before
    assert not keys[:, :first].any()
    for head, positions in enumerate(kept):
        slots = torch.arange(first, BUDGET)
        places = slots if "cache" in policy else positions + BUDGET - TOKENS
        expected = keys_of(model, text[positions], places)[:, head]
        assert torch.allclose(keys[head, first:], expected, atol=1e-4)


def test_a_long_text_is_turned_back_without_losing_digits():
    model = model_of("llama")
    cache = compressed(model, "recency", tokens=1500)
    exported = export_cache(cache)
    question = random_ids(8, seed=5)[:, 1:]
    with cache.budgets.raising(), torch.no_grad():
        ours = model(question, past_key_values=cache).logits
    kvtool.detach(model)
    assert (ours - continued(model, exported.tensors, question)).abs().max() < 2e-4


def test_merged_tokens_are_exported():
    model = model_of("llama")
    cache = compressed(model, "h2o+d2o-merge")
    held = cache.slot_layers[1].sorted_slots().stored["values"][0]
    assert torch.equal(export_cache(cache).tensors["layer.1.values"], held)


def test_a_text_that_fits_is_exported_whole():
    model = model_of("llama")
    cache = compressed(model, "snapkv", budget=128, tokens=20)
    exported = export_cache(cache)
    held = cache.slot_layers[0].sorted_slots().stored
    assert torch.equal(exported.tensors["layer.0.keys"], held["keys"][0])
    assert exported.metadata["tokens_seen"] == exported.metadata["slots"] == "20"


# ---- the file


def test_the_file_says_what_it_holds(tmp_path):
    model = model_of("gemma3")
    document = kvtool.export(
        compressed(model, "h2o"), tmp_path / "book.safetensors", dtype="bfloat16"
    )
    exported = read_exported(tmp_path / "book.safetensors")
    wanted = {
        "kind": "kvtool.virtual-prompt",
        "schema_version": "1",
        "slots": "32",
        "tokens_seen": "70",
        "policy": "h2o",
        "layers": "4",
        "kv_heads": "2",
        "head_dim": "16",
        "dtype": "bfloat16",
        "kvtool": kvtool.__version__,
    }
    assert wanted.items() <= exported.metadata.items()
    assert exported.name == "book"
    assert list(exported.ids) == document.virtual_ids
    tensors = load_file(tmp_path / "book.safetensors")
    assert tensors["layer.2.keys"].shape == (2, 32, 16)
    assert tensors["layer.2.keys"].dtype == torch.bfloat16
    assert document.bytes == sum(t.nbytes for name, t in tensors.items() if name[0] == "l")
    assert difference(exported.facts, facts_of(model.config)) is None


def test_ids_follow_from_what_the_file_holds():
    model = model_of("llama")
    ids = {}
    for policy in ("tova", "recency", "knorm"):
        cache = compressed(model, policy)
        first, again = export_cache(cache).ids, export_cache(cache, model_name="other").ids
        assert first == again
        ids[policy] = first
        ids[f"{policy} bf16"] = export_cache(cache, dtype=torch.bfloat16).ids
    heads = {tuple(each[:8]) for each in ids.values()}
    assert len(heads) == len(ids)


def test_special_tokens_are_no_ids():
    model = model_of("llama")
    model.config.eos_token_id = [3, 4, 5]
    model.generation_config.pad_token_id = 6
    found = set(export_cache(compressed(model, "recency", budget=1000, tokens=900)).ids)
    assert not found & {0, 1, 3, 4, 5, 6}
    assert len(found) > 60


# ---- refusals


REFUSED = {
    "a reader": ("llama", "quest", "reads a part of the cache at each step"),
    "two stages": ("llama", "rocketkv", "reads a part of the cache at each step"),
    "CaliDrop": ("llama", "h2o+calidrop", "corrects each step by evicted tokens"),
    "unequal heads": ("llama", "adakv(window=8)", "the heads of layer"),
    "unequal layers": ("llama", "pyramidkv(window=8)", "the layers hold"),
    "latents": ("deepseek_v3", "h2o", "stores latents in place of keys"),
    "a recurrence": ("qwen3_next", "h2o", "has `linear_attention` layers"),
    "attention beside it": ("falcon_h1", "h2o", "has `hybrid` layers"),
    "shared layers": ("gemma3n", "h2o", "read the keys of another layer"),
    "chunks": ("llama4", "h2o", "attend to chunks of the text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    family, policy, told = REFUSED[case]
    model = family_model(family)
    cache = compressed(model, policy, budget=24 if "pyramid" in policy else 48)
    with pytest.raises(UsageError, match=told):
        export_cache(cache)


PAGE = Path(kvtool.__file__).parent / "engines" / "README.md"
TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. Rain fell. " * 6


def page_names(start):
    """Policies that the engines' page names between a text and the end of its cell or bracket."""
    named = re.search(re.escape(start) + r"[^|)]*", PAGE.read_text()).group()
    return set(re.findall(r"`([a-z0-9+-]+)`", named))


def shares_out(text):
    """Whether a policy gives layers or heads unequal budgets."""
    policy = parse_policy(text)
    split = policy.allocator
    return policy.head_split is not None or (split is not None and split.name != "uniform")


def test_the_page_names_the_policies_of_unequal_counts():
    """`optimal` needs a plan, which the page names."""
    unequal = {name for name in BASES if shares_out(name)}
    unequal |= {f"+{name}" for name in ALLOCATORS if shares_out(f"snapkv+{name}")}
    assert page_names("unequal counts (") == unequal - {"+optimal"}


UNEQUAL = page_names("unequal counts (") - {"duoattention", "+duo"}


@pytest.mark.parametrize("policy", sorted(UNEQUAL))
def test_policies_of_unequal_counts_are_refused(policy):
    """Heads of `duo` differ only where a budget pays for all of a long text in some."""
    loaded = load()
    base = f"snapkv(window=8){policy}" if policy.startswith("+") else policy
    cache = kvtool.compress(loaded, TEXT, base, 160 if policy == "pyramidinfer" else 64)
    with pytest.raises(UsageError, match=r"hold .* and vLLM has one length"):
        export_cache(cache, model=loaded.model)


def test_policies_that_the_page_calls_the_same_in_both_are_exported():
    loaded, named = load(), page_names("Policies that cut prompts only (")
    assert named == {"snapkv", "expected", "lagkv"}
    for policy in named:
        assert parse_policy(policy).when == "prompt"
        exported = export_cache(kvtool.compress(loaded, TEXT, policy, 64), model=loaded.model)
        assert len(exported.ids) == 64
        assert exported.notes == ()


def test_policies_that_the_page_says_go_are_exported():
    loaded, named = load(), page_names("Those with equal counts: ")
    assert {"expected", "snapkv", "keydiff", "tova", "streaming", "h2o"} <= named
    for policy in named:
        cache = kvtool.compress(loaded, TEXT, policy, 64)
        for engine in ("vllm", "llamacpp", "mlx"):
            assert export_cache(cache, model=loaded.model, to=engine).metadata["slots"] == "64"


def test_rope_by_length_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = peaky_model("llama", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(KvtoolError, match=r"export to vLLM .* by the length of the text"):
        export_cache(compressed(model, "h2o"))


def test_a_plan_of_unequal_layers_is_refused(tmp_path):
    model = model_of("llama")
    plan = kvtool.plan(model, tokens=32, context=70, allocator="pyramid")
    cache = kvtool.build_cache(model, "h2o", plan=plan)
    prefill(model, cache, random_ids(TOKENS))
    with pytest.raises(UsageError, match=r"the layers hold .* one length for all of them"):
        export_cache(cache)


def test_other_caches_are_refused():
    model = model_of("llama")
    with pytest.raises(KvtoolError, match="the cache is empty"):
        export_cache(kvtool.build_cache(model, "h2o", budget=32))
    batch = kvtool.build_cache(model, "h2o", budget=32)
    prefill(model, batch, random_ids(TOKENS, batch=2))
    with pytest.raises(UsageError, match="the cache holds 2 texts"):
        export_cache(batch)
    with pytest.raises(UsageError, match="cache holds 11 tokens"):
        export_cache(compressed(model, "recency", budget=11))
    gemma = model_of("gemma3")
    small = compressed(gemma, "h2o", budget=16)
    with pytest.raises(UsageError, match=r"sliding window hold 23 tokens, .* room for 16"):
        export_cache(small)
    with pytest.raises(UsageError, match="to must be `vllm`"):
        kvtool.export(batch, "x.safetensors", to="sglang")


def test_policies_that_evict_while_decoding_are_warned_of():
    model = model_of("llama")
    [note] = export_cache(compressed(model, "h2o")).notes
    assert "`h2o` evicts while it decodes; vLLM keeps all that follows" in note
    assert export_cache(compressed(model, "snapkv(window=8)")).notes == ()
