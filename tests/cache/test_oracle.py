"""The slot cache against an oracle: a full cache that attends only to what a slow policy has kept.

Positions, scores and logits are compared after the prompt and after each of 8 decoded tokens; the
tokens are the oracle's own most likely ones.
"""

import itertools

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import anchored_model, family_model, prompt
from tests.reference import oracle
from tests.reference.policies import Told, build

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTH, BUDGET, NEW = 61, 20, 8
MODES = {"full": None, "block:20": 20, "block:16": 16, "block:12": 12}

STEADY = [
    ("recency", {}),
    ("streaming", {}),
    ("streaming", {"sinks": 1}),
    ("keydiff", {}),
    ("keydiff", {"sinks": 2, "recent": 5}),
    ("knorm", {}),
    ("knorm", {"sinks": 2, "recent": 5}),
    ("lagkv", {}),
    ("lagkv", {"sinks": 1, "lag": 6, "rank": False}),
]
ATTENDING = [
    ("scissorhands", {}),
    ("scissorhands", {"recent": 3}),
    ("h2o", {}),
    ("h2o", {"recent": 0}),
    ("tova", {}),
    ("tova", {"head_reduce": "kv_head"}),
    ("roco", {}),
    ("roco", {"scope": 4, "protect_recent": 0, "sinks": 0}),
    ("snapkv", {"window": 8}),
    ("snapkv", {"window": 5, "kernel": 3, "pool": "avg"}),
]
CASES = [(base, None, options) for base, options in STEADY] + [
    (base, modifier, options)
    for base, options in ATTENDING
    for modifier in (None, "caote", "fastcaote")
    if not (modifier and options.get("head_reduce"))  # modifiers make it so by themselves
]


def spell(base, modifier, options):
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    return base + (f"({inside})" if inside else "") + (f"+{modifier}" if modifier else "")


class Run:
    """A kvtool cache on a model, fed the prompt and then token by token."""

    def __init__(self, model, policy, budget, mode, ids):
        self.model = kvtool.attach(model)
        self.cache = kvtool.build_cache(model, policy, budget, prefill=mode)
        self.logits = prefill(model, self.cache, torch.tensor([ids]))[0]

    def feed(self, token):
        self.logits = decode_step(self.model, self.cache, torch.tensor([token]))[0]

    def kept(self):
        layers = range(self.model.config.num_hidden_layers)
        kept = {layer: self.cache.kept_positions(layer)[0].tolist() for layer in layers}
        return {layer: [[p for p in head if p >= 0] for head in kept[layer]] for layer in kept}


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


def follow(
    model, make_policy, policy, budget, mode, ids, new=NEW, cached_heads=None, kind=oracle.Oracle
):
    """Run both and compare them step by step."""
    trace = oracle.run(model, make_policy, ids, MODES[mode], new, cached_heads, kind)
    run = Run(model, policy, budget, mode, ids)
    for step in range(new + 1):
        if step:
            run.feed(trace.tokens[step - 1])
        assert run.kept() == trace.kept[step], f"{policy}, step {step}"
        torch.testing.assert_close(run.logits, trace.logits[step], atol=1e-4, rtol=1e-4)
    return trace


def in_turn(cases):
    """Each case once, with families and modes in turn; the last of the blocks is one token."""
    settings = itertools.cycle(itertools.product(["llama", "qwen3"], ["full", "block:20"]))
    return [(*setting, *case) for setting, case in zip(settings, cases, strict=False)]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "mode", "base", "modifier", "options"),
    in_turn(CASES),
    ids=[spell(*case) for case in CASES],
)
def test_kept_positions_and_logits_equal_the_oracle(model, mode, base, modifier, options):
    follow(
        model,
        lambda: build(base, BUDGET, modifier, **options),
        spell(base, modifier, options),
        BUDGET,
        mode,
        prompt(LENGTH),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize(
    ("base", "length", "mode"),
    [
        ("h2o", 21, "block:12"),
        ("h2o", 20, "full"),
        ("tova", 19, "block:12"),
        ("snapkv", 21, "full"),
        ("snapkv", 1, "block:12"),
    ],
)
def test_prompts_around_the_budget(model, base, length, mode):
    options = {"window": 7} if base == "snapkv" else {}
    policy, ids, new = spell(base, "caote", options), prompt(length), max(4, 23 - length)
    make = lambda: build(base, BUDGET, "caote", **options)  # noqa: E731
    follow(model, make, policy, BUDGET, mode, ids, new=new)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "mode", "cached_heads", "base", "modifier", "options"),
    [
        # soft-capped logits, and every other layer slides over 24 tokens
        ("gemma2", "block:16", None, "h2o", "caote", {}),
        ("gemma3", "full", None, "snapkv", "caote", {"window": 8}),
        ("phi3", "block:16", None, "tova", None, {}),
        ("gpt_oss", "full", None, "tova", None, {}),  # a sink logit per head
        ("gpt_oss", "block:16", None, "snapkv", "caote", {"window": 8}),
        ("deepseek_v3", "full", 1, "roco", "fastcaote", {}),  # one latent for all heads
        ("deepseek_v3", "block:16", 1, "h2o", "caote", {}),
    ],
)
def test_families_with_attention_of_their_own(family, mode, cached_heads, base, modifier, options):
    model, policy = kvtool.detach(family_model(family)), spell(base, modifier, options)
    make = lambda: build(base, BUDGET, modifier, **options)  # noqa: E731
    follow(model, make, policy, BUDGET, mode, prompt(45), new=4, cached_heads=cached_heads)


@pytest.mark.parametrize("family", ["llama"])
def test_a_ratio_is_the_floor_of_its_share_of_the_prompt(model):
    # 0.3 * 61 = 18.3, 0.5 * 61 = 30.5
    for ratio, tokens, mode in (("30%", 18, "block:16"), (0.5, 30, "full")):
        follow(model, lambda n=tokens: build("h2o", n), "h2o", ratio, mode, prompt(61), new=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("policy", ["random(per_head=true,sinks=2,recent=3)", "random"])
def test_random_attends_to_what_it_says_it_keeps(model, policy):
    """The draws are the product's own; given them, the oracle computes the same logits."""
    ids, tokens = prompt(LENGTH), prompt(NEW, seed=1)
    plans, logits = {layer: [] for layer in range(3)}, []
    run = Run(model, policy, BUDGET, "full", ids)
    for token in [None, *tokens]:
        if token is not None:
            run.feed(token)
        logits.append(run.logits)
        for layer, kept in run.kept().items():
            assert [len(head) for head in kept] == [BUDGET, BUDGET]
            plans[layer].append(kept)
    kvtool.detach(model)
    layers = iter(range(3))
    told = oracle.Oracle(model, lambda: Told(plans[next(layers)]))
    steps = [told.feed(ids), *(told.feed([token]) for token in tokens)]
    torch.testing.assert_close(torch.stack(logits), torch.stack(steps), atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("base", ["h2o", "roco"])
def test_the_statistics_beside_the_slots_are_the_oracles(model, base):
    """After eviction, overwriting and decoding, each slot has its own token's numbers."""
    ids = prompt(LENGTH)
    slow = oracle.Oracle(model, lambda: build(base, BUDGET))
    for start in range(0, LENGTH, 16):
        slow.feed(ids[start : start + 16])
    tokens = prompt(NEW, seed=1)
    slow.in_prompt = False
    for token in tokens:
        slow.feed([token])
    run = Run(model, base, BUDGET, "block:16", ids)
    for token in tokens:
        run.feed(token)
    for index, layer in enumerate(run.cache.layers):
        slots, stored = layer.stored_positions()[0], layer.slots.state
        score = layer.policy.ranking.importance(
            {name: number[:, :, : layer.slots.used] for name, number in stored.items()}, None, None
        )[0]
        for head, kept in enumerate(slow.kept[index]):
            place = [slots[head].tolist().index(p) for p in kept]
            expected = slow.policies[index].scores(head, kept, None)
            torch.testing.assert_close(
                score[head, place], torch.tensor(expected), atol=1e-5, rtol=1e-4
            )


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize(
    ("base", "modifier", "options", "chunks"),
    [
        ("h2o", "caote", {}, None),
        ("snapkv", "fastcaote", {"window": 8}, None),
        ("tova", None, {}, 16),
        ("roco", None, {}, 16),
    ],
)
def test_generate_takes_the_oracles_tokens(model, base, modifier, options, chunks):
    """transformers' own loop, the prompt at once or in chunks of the user's size."""
    ids = prompt(LENGTH)
    trace = oracle.run(model, lambda: build(base, BUDGET, modifier, **options), ids, chunks, 7)
    cache = kvtool.build_cache(kvtool.attach(model), spell(base, modifier, options), BUDGET)
    out = model.generate(
        torch.tensor([ids]),
        past_key_values=cache,
        max_new_tokens=8,
        do_sample=False,
        prefill_chunk_size=chunks,
    )
    assert out[0, LENGTH:].tolist() == trace.tokens
    for layer, kept in trace.kept[-1].items():
        assert cache.kept_positions(layer)[0].tolist() == kept


def test_the_oracle_without_a_budget_is_the_model():
    model = anchored_model("llama")
    ids = prompt(LENGTH)
    trace = oracle.run(model, lambda: build("full", 1), ids, 16, 3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([ids + trace.tokens[:3]])).logits[0, -4:]
    torch.testing.assert_close(torch.stack(trace.logits), out, atol=2e-5, rtol=1e-4)
