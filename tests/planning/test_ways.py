"""Ways to run a model in a memory: what they hold, whether they fit, and in which order."""

import json
from dataclasses import replace

import pytest

import kvtool
from kvtool.calls.plan import plan as make
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.models.load import load
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.fit import Run
from kvtool.planning.lost_answers import NOISE, Loss, of_points, packaged
from kvtool.planning.recommend import measured_losses
from kvtool.planning.variants import FULL_CACHE, Variant
from kvtool.planning.ways import NEARLY, list_ways
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget
from tests.models.bundled import shipped
from tests.models.published import LLAMA_3 as LLAMA
from tests.models.published import QWEN_25_CODER
from tests.planning.bytes_table import NEW, PROMPT, held_by, plan_for
from tests.planning.documents import shape
from tests.planning.test_recommend import arm, measured, run_of
from tests.tiers import first

GIB = 2**30
TEXT = Text(PROMPT, NEW, 1, 1195)
WEIGHTS = 16_060_522_496  # 8,030,261,248 parameters in bfloat16


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with the configuration alone."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def ways_of(llama, **target):
    asked = {"context": "100K", "max_new_tokens": "1K"} | target
    return make(llama, **asked)


def by_name(document):
    return {way.policy: way for way in document.ways}


def test_100k_tokens_of_llama_in_5_gib_start_with_all_of_them_in_4_bits(llama):
    document = ways_of(llama, bytes="5GiB")
    first = document.ways[0]
    assert (first.policy, first.kind, first.tokens, first.share) == (
        "full+int4",
        "bits",
        101376,
        1.0,
    )
    # 72 bytes for a key or value of 128 in 4 bits, 4 for the position, 3 for a channel's range
    slots = 32 * 8 * 102400 * (2 * 72 + 4)
    assert first.bytes == slots + 32 * 8 * 128 * 3
    ways = by_name(document)
    order = [way.policy for way in document.ways if way.fits]
    assert order.index("full+int4") < order.index("keydiff+int8") < order.index("keydiff")
    assert ways["keydiff+int8"].tokens == 79435
    assert ways["keydiff"].tokens == 40641
    assert [ways[name].fits for name in ("full", "full+int8", "full+k8v4")] == [False] * 3
    assert ways["full"].excess == 32 * 8 * 102400 * (512 + 4) - 5 * GIB
    # the plan itself is as it was before plans had ways
    assert document.policy is None
    assert document.target.bytes == 5 * GIB
    assert sum(document.layers.tokens) == 15 * 40642 + 17 * 40641
    assert document.ways_source.startswith("measured with a model of 135 million parameters")


def test_what_repeats_its_prompt_fits_in_blocks(llama):
    """Stored at the peak: budget and block in all layers, and 4 bytes of a weight.

    Beside them is a layer's copy, or what the cut takes of its own. 100K tokens less an answer of
    1K are 198 blocks of 512.
    """
    ways = by_name(ways_of(llama, bytes="5GiB"))
    way = ways["kvzip"]
    heads, n, block = 32 * 8, 101376, 512
    assert (way.prefill, way.fits) == ("block", True)

    def held(tokens):
        copy, competing = 8 * (n + block + 64) * 512, 48 * heads * (tokens + block)
        return heads * (tokens + block) * (512 + 4 + 4) + max(copy, competing)

    assert held(way.tokens) <= 5 * GIB < held(way.tokens + 1)
    assert way.peak.block < way.peak.full
    assert ways["kvzip+int8"].tokens > 1.5 * way.tokens


def test_a_plan_for_kvzip_says_what_reading_takes(llama):
    document = ways_of(llama, bytes="5GiB", policy="kvzip")
    assert document.totals.bytes <= 5 * GIB
    assert document.totals.reading > 32 * 8 * 101376 * 512
    assert "14.9 GiB while it reads" in " ".join(document.table().split())
    assert ways_of(llama, bytes="5GiB", policy="keydiff").totals.reading is None


def test_the_order_is_by_steps_of_the_noise_and_then_by_what_is_kept(llama):
    ways = [way for way in ways_of(llama, bytes="5GiB").ways if way.fits]
    keys = [(int(way.loss.worse / NOISE), -way.share) for way in ways]
    assert keys == sorted(keys)
    assert len({step for step, _ in keys}) > 3


def test_ways_that_keep_nearly_everything_are_listed_once(llama):
    """A token less than all takes buffers that do not grow, whichever policy evicts it."""
    document = ways_of(llama, memory="24GiB", context="103424")
    fitting = [way for way in document.ways if way.fits]
    assert [way.policy for way in fitting][:4] == [
        "full+k8v4",
        "full+int4",
        "expected+int8",
        "expected",
    ]
    assert fitting[2].tokens == document.target.prompt_tokens - 1
    assert all(way.share < NEARLY for way in fitting[3:])
    # where everything fits in the same bits, nothing that keeps nearly all is beside it
    size = str(by_name(document)["full+int8"].bytes)
    ways = by_name(ways_of(llama, bytes=size, context="103424"))
    assert ways["full+int8"].fits
    assert "rkv+int8" not in ways
    less = f"{int(size) - 2**20}"
    ways = by_name(ways_of(llama, bytes=less, context="103424"))
    fits = [name for name in ways if name.endswith("+int8") and ways[name].fits]
    assert fits == ["expected+int8", "kvzip+int8"]
    assert ways["kvzip+int8"].share < NEARLY  # it needs more while it reads
    assert NEARLY <= ways["expected+int8"].share < 1


def test_policies_that_keep_nearly_everything_differ_by_less_than_the_noise():
    losses = packaged()
    assert max(losses.at(name, NEARLY).worse for name in losses.offered) < NOISE / 2


def coarse(ways):
    """Whether each way that fits has keys in 4 bits."""
    return [way.key_bits < 8 for way in ways if way.fits]


def test_where_keys_have_biases_keys_in_4_bits_come_last(llama, tmp_path):
    """Those of Llama have none: `keydiff+int4` keeps more than `keydiff+int8`, and comes first."""
    of_llama = coarse(ways_of(llama, bytes="4GiB").ways)
    assert of_llama != sorted(of_llama)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_25_CODER))
    for size in ("64MiB", "128MiB", "256MiB"):
        document = ways_of(str(tmp_path), bytes=size, context="32K")
        assert coarse(document.ways) == sorted(coarse(document.ways))
    order = [way.policy for way in document.ways if way.fits]
    assert order[:3] == ["full+int8", "full+fp8", "full+k8v4"]
    assert order[-1] == "full+int4"
    assert "keys of this model have biases" in document.ways_source
    lost = by_name(document)["full+int4"].loss
    assert (lost.known, lost.later) == (0.02, 0.02)
    shown = ways_of(str(tmp_path), bytes="300MiB", context="32K")  # where few others are listed
    told = " ".join(shown.table().split())
    assert "full+int4 * " in told
    assert "keys in 4 bits cost reasoning in steps; k8v4 keeps keys in 8 bits" in told
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"attention_bias": True}))
    biased = coarse(ways_of(str(tmp_path), bytes="4GiB").ways)
    assert biased == sorted(biased) != of_llama


@pytest.mark.parametrize("measured_here", [True, False])
def test_what_was_measured_of_a_model_with_biases_orders_its_ways(measured_here):
    """Equals have 8 bits first; a measured gain of 4 bits counts where it is of this model."""
    from kvtool.plain_config import plain_config

    config = plain_config(QWEN_25_CODER)
    room = Run(config, "bfloat16", FULL_CACHE, Text(1000), {}, None, size=2**30)
    names = ("full+int8", "full+k8v4", "full+int4")
    model = config_hash(config) if measured_here else "another"
    for lost, better in (((0.01, 0.01, 0.0), False), ((0.2, 0.2, 0.0), True)):
        points = [(name, 1.0, Loss(x, x)) for name, x in zip(names, lost, strict=True)]
        losses = of_points("", points)
        ways = list_ways(room, replace(losses, model=model), lambda policy, *_: str(policy))
        order = [way.policy for way in ways]
        first = order.index("full+int4") < order.index("full+int8")
        assert first == (better and measured_here)


def test_sparse_reading_fits_where_the_whole_cache_does(llama):
    few, many = (by_name(ways_of(llama, bytes=size))["quest"] for size in ("12GiB", "16GiB"))
    assert not few.fits
    assert many.fits
    assert many.kind == "reading"
    assert many.tokens == 101376
    assert many.reads == 25927  # 256 of 1001
    assert many.traffic < 0.3 * by_name(ways_of(llama, bytes="16GiB"))["full"].traffic


def test_a_memory_holds_weights_cache_and_what_reading_takes(llama):
    document = ways_of(llama, memory="24GiB")
    assert document.device.memory == 24 * GIB
    assert document.device.weights == WEIGHTS
    for way in document.ways:
        assert way.fits == (way.peak_bytes <= 24 * GIB)
        assert way.excess == max(0, way.peak_bytes - 24 * GIB)
        assert way.peak_bytes > WEIGHTS + way.bytes * 0.9
    # without a policy the plan is for the first way
    first = document.ways[0]
    assert document.policy == first.policy == "full+k8v4"
    assert document.planned_bytes == first.bytes
    # a token more of an eviction would not fit
    keydiff = by_name(document)["keydiff"]
    text = Text(101376, 1024)
    run = Run(_config(llama), "bfloat16", FULL_CACHE, text, {None: WEIGHTS}, 24 * GIB, device="")
    policy = parse_policy("keydiff")
    assert run.least_peak(policy, keydiff.tokens) <= 24 * GIB
    assert run.least_peak(policy, keydiff.tokens + 1) > 24 * GIB


def test_a_policy_gets_what_the_memory_leaves(llama):
    document = ways_of(llama, memory="24GiB", policy="keydiff")
    assert document.ways is None
    assert document.policy == "keydiff"
    assert set(document.layers.tokens) == {
        by_name(ways_of(llama, memory="24GiB"))["keydiff"].tokens
    }
    fewer = ways_of(llama, memory="24GiB", policy="keydiff", quantize="4bit")
    assert fewer.layers.tokens[0] > document.layers.tokens[0]
    assert ways_of(llama, memory="24GiB", policy="full+int4").planned_bytes < 4 * GIB


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"memory": "8GiB"}, "the weights take 15.0 GiB of 8.0 GiB"),
        ({"memory": "8GiB", "context": "4K"}, "what would: --quantize 4bit"),
        ({"memory": "24GiB", "policy": "full"}, "does not fit: 7.9 GiB too much; what would: "),
        ({"memory": "24GiB", "policy": "keydiff", "tokens": 90000}, "does not fit"),
        ({"memory": "512"}, "--memory is a number of bytes such as 8GiB, got `512`"),
        ({"memory": "24GB"}, "--memory is a number of bytes such as 8GiB, got `24GB`"),
        ({"policy": "full", "bytes": "5GiB"}, "`full` stores everything, which takes 12.6 GiB"),
        ({"policy": "full+int4", "tokens": 512}, "keeps everything, so --budget has nothing"),
        ({"policy": "full+int4", "ratio": "50%"}, "keeps everything, so --ratio has nothing"),
        ({"policy": "full", "allocator": "pyramid"}, "so --allocator has nothing to plan"),
        ({}, "no target"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_in_one_line(llama, asked, said):
    with pytest.raises(UsageError) as refused:
        ways_of(llama, **asked)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_results_give_the_order_where_they_are_given():
    """128 of 640 tokens lost 10 % of the known questions: a fifth of any prompt."""
    entries = {arm("h2o"): -0.08, arm("full+int8", None): 0.0, arm("tova", 256): -0.4}
    losses = measured_losses(run_of(measured(entries), list(entries)))
    assert losses.offered == ["h2o", "tova"]
    assert losses.at("h2o", 0.2).known == pytest.approx(0.1)
    assert losses.at("h2o", 0.2).later is None
    assert losses.of_codec("int8").known == 0
    assert losses.of_codec("int4") is None
    assert losses.source == "measured in the results given, with `kvtool/reference`"
    run = Run(tiny(), "bfloat16", FULL_CACHE, Text(1000), size=4 * 500 * 256)
    assert run.layers == shape().layer_shapes()
    ways = list_ways(run, losses, lambda policy, tokens, prefill: str(policy))
    fitting = [way.policy for way in ways if way.fits]
    # h2o loses 7 % at 49 % of the tokens, tova+int8 7 % at 92 %: equal, so the second comes first
    assert fitting == ["h2o+int8", "tova+int8", "h2o", "tova"]
    assert {way.policy for way in ways if not way.fits} == {"full", "full+int8", "full+fp8"}


def tiny():
    """A configuration of the sizes of `shape()`."""
    from kvtool.plain_config import plain_config

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return plain_config(LLAMA | sizes | heads)


def _config(llama):
    from kvtool.models.load import read_config

    return read_config(llama)


SIZES = (200_000, 500_000, 1_500_000, 3_500_000)


RUNS = [
    ("rocketkv", 1_500_000),
    ("quest", 3_500_000),
    ("tova+fp8", 200_000),
    # the exhaustive tier from here
    ("rocketkv", 200_000),
    ("full+int4", 1_500_000),
    ("kvzip+int8", 200_000),
    ("expected+k8v4", 3_500_000),
]


@pytest.mark.parametrize("case", first(3, RUNS), ids=str)
def test_a_way_holds_what_its_plan_and_its_run_hold(bundled, case):
    """Planned bytes, those of the way and those of tensors are the same, whether it is listed."""
    name, size = case
    model, config = bundled
    run = Run(config, "float32", FULL_CACHE, TEXT, size=size)
    way, policy = listed(run).get(name), parse_policy(name)
    if way is not None:
        budget = {"tokens": way.reads or way.tokens} if policy.takes_budget else {"ratio": 1}
        plan = plan_for(model, policy, **budget)
        assert way.bytes == plan.totals.storage.bytes
        assert (way.bytes <= size) or not way.fits
    else:  # a better one of the same kind was listed, or all tokens fit
        if name == "rocketkv" and size < SIZES[2]:
            with pytest.raises(UsageError, match="16 pairs per step in every layer"):
                plan_for(model, policy, bytes=size)
            return
        plan = plan_for(model, policy, bytes=size)
        assert plan.totals.storage.bytes <= size
    assert held_by(model, policy, plan) == plan.totals.storage.bytes


def listed(run):
    return {way.policy: way for way in list_ways(run, packaged(), lambda *words: "")}


@pytest.fixture(scope="module")
def bundled():
    model = kvtool.attach(load(str(shipped())).model)
    return model, model.config


def test_the_peak_of_a_way_is_that_of_a_dry_run(llama):
    from kvtool.documents.memory import DeviceMemory

    config, text = _config(llama), Text(101376, 1024)
    way = by_name(ways_of(llama, bytes="5GiB"))["keydiff+int8"]
    device = DeviceMemory(device="cuda", free_bytes=None, weights_bytes=0)
    for prefill, peak in (("block", way.peak.block), ("full", way.peak.full)):
        variant = Variant(parse_policy(way.policy), Budget(tokens=way.tokens), prefill)
        found = estimate_memory(config, "bfloat16", variant, text, device)
        assert found.peak_bytes == peak
        assert found.kv_bytes + found.state_bytes == way.bytes
