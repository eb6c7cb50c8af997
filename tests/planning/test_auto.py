"""A budget of `auto`: the share of what weights and reading the prompt leave of a memory."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.documents.memory import DeviceMemory
from kvtool.errors import UsageError
from kvtool.models.load import load
from kvtool.planning.bytes import Text
from kvtool.planning.fit import Run, choose_bytes, chosen_note, keeps_all
from kvtool.sizes import Budget
from kvtool.watcher import Watcher
from tests.evaluation.variants import make_variants
from tests.models.bundled import shipped
from tests.models_for_tests import family_model
from tests.pretend_device import DEVICE, pretended, put

CONFIG = family_model("llama").config
TEXT = Text(4096, 32)
WEIGHTS = 3 * 2**20
AUTO = Budget.parse("auto")


def run_of(policy, prefill="block"):
    (variant,) = make_variants([policy], ["64"], prefill=prefill, baseline=False)
    return Run(CONFIG, "float32", variant, TEXT, {})


def there(free, weights=WEIGHTS):
    return DeviceMemory(device="cpu", free_bytes=free, weights_bytes=weights)


@pytest.mark.parametrize(
    ("policy", "share"),
    [("h2o", "auto"), ("streaming+int8", "auto:5%"), ("rocketkv", "auto:1/3")],
)
def test_the_budget_is_the_share_of_what_is_left(policy, share):
    """Worked from the definition: bytes <= share x (free - weights - reading), the next not."""
    asked, free = Budget.parse(share), 24 * 2**20
    run = run_of(policy)
    chosen = choose_bytes([run], asked, there(free)).bytes

    def excess(size):
        reading = run.under(Budget(bytes=size)).needs().reading
        return size - asked.share * (free - WEIGHTS - reading)

    assert excess(chosen) <= 0 < excess(chosen + 1024)


def test_the_peak_stays_within_the_memory():
    for policy in ("h2o", "kvzip", "snapkv+int8", "roco"):
        run = run_of(policy)
        chosen = choose_bytes([run], AUTO, there(20 * 2**20))
        assert run.under(chosen).needs().working <= 17 * 2**20


def test_the_most_demanding_run_decides():
    small, large = run_of("h2o"), replace(run_of("h2o", "full"), text=Text(6000, 32))
    both = choose_bytes([small, large], AUTO, there(40 * 2**20))
    assert both == choose_bytes([large], AUTO, there(40 * 2**20))
    assert both.bytes < choose_bytes([small], AUTO, there(40 * 2**20)).bytes


def test_large_budgets_are_whole_mebibytes():
    size = choose_bytes([run_of("h2o")], AUTO, there(2**30 + 12345)).bytes
    assert size % 2**20 == 0
    assert str(Budget(bytes=size)).endswith("MiB")


def test_a_budget_that_holds_all_is_said():
    run = run_of("h2o")
    large = choose_bytes([run], AUTO, there(2**30))
    assert keeps_all(run, large)
    note = chosen_note(large, AUTO, there(2**30), [run])
    assert note.endswith("it holds the whole prompt of 4096 tokens, so nothing of it is evicted")
    small = choose_bytes([run], AUTO, there(6 * 2**20))
    assert not keeps_all(run, small)
    assert chosen_note(small, AUTO, there(6 * 2**20), [run]) == (
        f"budget: {small}, 80% of what weights and reading the prompt leave "
        "(weights 3.0 MiB; 6.0 MiB free on cpu)"
    )


@pytest.fixture(scope="module")
def elsewhere():
    """The bundled model on a device that is not the CPU, with its tokenizer."""
    loaded = load(str(shipped()))
    return put(loaded.model), loaded.tokenizer


class Notes(Watcher):
    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.mark.parametrize(
    ("policy", "prefill"),
    [("snapkv", "full"), ("streaming+int8", "block:128")],
)
def test_a_device_is_asked_what_it_has_free(elsewhere, monkeypatch, policy, prefill):
    """Its own memory counts, not the machine's; the cache on it fills what was chosen."""
    model, tokenizer = elsewhere
    free, asked = 8 * 2**20, "auto:5%"
    device = SimpleNamespace(mem_get_info=lambda place: (free, 2**30))
    monkeypatch.setattr(torch, DEVICE.type, device, raising=False)
    monkeypatch.setattr("kvtool.models.placement._free_ram", lambda: pytest.fail("asked the CPU"))
    prompt, watcher = "The code is 12. " * 60, Notes()
    with pretended():
        more = {"tokenizer": tokenizer, "prefill": prefill, "watcher": watcher}
        report = kvtool.compress(model, prompt, policy, asked, **more).report()
    (note,) = [line for line in watcher.lines if line.startswith("budget: ")]
    chosen, _, reason = note.removeprefix("budget: ").partition(", ")
    assert reason == (
        "5% of what weights and reading the prompt leave (weights 0 B; 8.0 MiB free on meta)"
    )
    (variant,) = make_variants([policy], [chosen], prefill=prefill, baseline=False)
    tokens = report.tokens_seen
    run = Run(model.config, "float32", variant, Text(tokens), {})
    assert choose_bytes([run], Budget.parse(asked), there(free, 0)) == Budget.parse(chosen)
    held = report.allocated_bytes + report.state_bytes
    size = Budget.parse(chosen).bytes
    assert held <= size < held + held / min(report.kept_per_layer)  # no token more in every layer
    assert max(report.kept_per_layer) < tokens


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (there(None), "the free memory is not known"),
        (there(2**30, None), "the size of the weights is not known"),
        (there(2**20), r"nothing is left; weights 3.0 MiB; 1.0 MiB free on cpu"),
        (there(WEIGHTS + 4096), "leave too little; budget 2KiB is too small"),
    ],
)
def test_where_nothing_is_left_it_is_refused(memory, told):
    with pytest.raises(UsageError, match=told):
        choose_bytes([run_of("h2o")], AUTO, memory)


def test_what_is_typed_reads_back():
    for text, share in (("auto", Fraction(4, 5)), ("AUTO:60%", Fraction(3, 5)), ("auto:1", 1)):
        budget = Budget.parse(text)
        assert budget.share == share
        assert Budget.parse(str(budget)) == budget
    assert str(Budget.parse("auto:80%")) == "auto"


@pytest.mark.parametrize("text", ["automatic", "auto:", "auto:0", "auto:130%", "auto:2GiB"])
def test_other_words_are_refused(text):
    with pytest.raises(UsageError):
        Budget.parse(text)


def test_a_cache_takes_no_share_of_a_device():
    model = kvtool.attach(family_model("llama"))
    with pytest.raises(UsageError, match="`auto` is of a device's free memory"):
        kvtool.build_cache(model, "h2o", "auto")
