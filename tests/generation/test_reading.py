"""The bar of a prompt: how many of its tokens have been read, whole and in blocks."""

from contextlib import contextmanager

import pytest
import torch

import kvtool
from kvtool.generation import compress
from kvtool.generation.reading import reading
from kvtool.models import reference
from kvtool.models.load import load
from kvtool.watcher import Watcher

TOKENS = 1100


class Bars(Watcher):
    """Keeps what bars were told: their totals, and steps."""

    shows_progress = True

    def __init__(self):
        self.totals, self.steps, self.ended = [], [], False

    @contextmanager
    def progress(self, total):
        self.totals.append(total)
        yield lambda text, steps=1: self.steps.append(steps)
        self.ended = True


@pytest.fixture(scope="module")
def loaded():
    return load(str(reference.path()))


def read(loaded, watcher, prefill, *, seconds=9.0, tokens=TOKENS):
    """Read a prompt with a clock that goes on by some seconds at every look."""
    cache = kvtool.build_cache(loaded.model, "h2o", 64, prefill=prefill)
    ids = torch.arange(tokens)[None] % 50 + 100
    times = iter(torch.arange(10**6).mul(seconds).tolist())
    with reading(loaded.model, tokens, watcher, clock=lambda: next(times)):
        compress(loaded.model, cache, ids)
        if watcher.totals:
            assert watcher.ended  # before anything follows the prompt
    assert not any(module._forward_hooks for module in loaded.model.model.layers)


def test_whole_prompts_are_counted_by_layers(loaded):
    watcher = Bars()
    read(loaded, watcher, "full")
    layers = len(loaded.model.model.layers)
    assert watcher.totals == [TOKENS]
    shares = [TOKENS * done // layers for done in range(layers)]  # the bar ends with the last one
    assert watcher.steps == [shares[i] - shares[i - 1] for i in range(1, layers)]


def test_blocks_are_counted_by_tokens(loaded):
    watcher = Bars()
    read(loaded, watcher, "block:100")
    assert watcher.totals == [TOKENS]
    assert TOKENS - 100 <= sum(watcher.steps) < TOKENS
    assert len(watcher.steps) == 11 * len(loaded.model.model.layers) - 1


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, TOKENS), (9.0, 1000)], ids=["fast", "short"])
def test_no_bar(loaded, seconds, tokens):
    watcher = Bars()
    read(loaded, watcher, "block:100", seconds=seconds, tokens=tokens)
    assert watcher.totals == []


def test_a_reading_that_breaks_off_ends_its_bar(loaded):
    watcher = Bars()
    with reading(loaded.model, TOKENS, watcher, clock=iter(range(0, 99, 9)).__next__):
        loaded.model(torch.arange(8)[None])
    assert (watcher.totals, watcher.ended) == ([TOKENS], True)
    assert not any(module._forward_hooks for module in loaded.model.model.layers)
