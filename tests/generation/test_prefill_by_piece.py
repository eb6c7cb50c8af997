"""A prompt that is read in pieces is the prompt read at once, and others go on between."""

import itertools
import threading

import pytest
import torch

import kvtool
from kvtool.generation.answering_thread import Job, LiveAnswers, Opened
from kvtool.generation.conversation import Asked
from kvtool.generation.feeding import decode_step, prefill_by_piece, run_to_end
from kvtool.generation.serving import Drawing
from kvtool.models.load import load
from tests.contract.cases import cases
from tests.models_for_tests import family_model
from tests.tiers import first

TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. " * 6
PIECE, BUDGET = 30, 40
POLICIES = [case for case in cases() if case.policy.codec is None]


@pytest.fixture(scope="module")
def loaded():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


def read(loaded, case, piece):
    """The kept positions behind the prompt, and the logits there and after some tokens."""
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    cache = kvtool.build_cache(loaded.model, case.text, BUDGET if case.bounded else None)
    steps = prefill_by_piece(
        loaded.model, cache, ids, new_tokens=6, tokenizer=loaded.tokenizer, piece=piece
    )
    logits = [run_to_end(steps)]
    kept = [cache.kept_positions(layer.index).tolist() for layer in cache.slot_layers]
    slots = [layer.slots.capacity for layer in cache.slot_layers if layer.ragged is None]
    for _ in range(5):
        logits.append(decode_step(loaded.model, cache, logits[-1].argmax(-1)))
    return kept, slots, torch.stack(logits)


@pytest.mark.parametrize("case", first(24, POLICIES), ids=lambda case: case.text)
def test_pieces_come_to_the_prompt_read_at_once(loaded, case):
    whole, pieces = read(loaded, case, None), read(loaded, case, PIECE)
    assert pieces[:2] == whole[:2]
    torch.testing.assert_close(pieces[2], whole[2], atol=5e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma3n", "deepseek_v3", "lfm2", "falcon", "llama4", "gemma4"]
)
def test_pieces_of_every_kind_of_layer_come_to_the_prompt(name):
    model = kvtool.attach(family_model(name))
    ids = torch.randint(3, 90, (1, 50), generator=torch.Generator().manual_seed(0))
    found = []
    for piece in (None, 12):
        cache = kvtool.build_cache(model, "h2o", 20)
        logits = [run_to_end(prefill_by_piece(model, cache, ids, new_tokens=4, piece=piece))]
        kept = [cache.kept_positions(layer.index).tolist() for layer in cache.slot_layers]
        for _ in range(3):
            logits.append(decode_step(model, cache, logits[-1].argmax(-1)))
        found.append((kept, torch.stack(logits)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-4)


def job(loaded, name, text, policy, tokens, heard):
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    return Job(
        name,
        lambda: Opened(kvtool.build_cache(loaded.model, policy, 32), Asked(ids, None)),
        tokens,
        0,
        Drawing(),
        lambda token: heard.append(name),
        lambda result: heard.append(result),
    )


@pytest.mark.parametrize(
    ("policy", "memory", "pieces"),
    [("h2o", None, 5), ("h2o+int8", None, 1), ("h2o", 2**16, 1)],
)
def test_answers_go_on_between_the_pieces_of_a_prompt(loaded, policy, memory, pieces):
    """The long one takes more memory while it is whole than there may be."""
    forwards, heard = [], []
    loaded.model.register_forward_pre_hook(
        lambda module, given, named: forwards.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    answers = LiveAnswers(loaded.model, loaded.tokenizer, memory=memory, piece=PIECE)
    with answers._change:  # both are there before the first is begun
        answers._coming += [
            job(loaded, "short", "Hi", "h2o", 60, heard),
            *(job(loaded, "long", TEXT, policy, 3, heard) for _ in range(3)),
        ]
        answers._change.notify()
    while sum(not isinstance(each, str) for each in heard) < 4:
        threading.Event().wait(0.02)
    answers.stop()
    places = [place for place, size in enumerate(forwards) if size > 1][1:]
    long = [forwards[place] for place in places]
    assert len(long) == 3 * pieces
    assert sum(long) == 3 * len(loaded.tokenizer(TEXT)["input_ids"])
    assert max(long) <= PIECE or pieces == 1
    # between two pieces all others take a step: no stream waits for more than one of them
    assert all(after - before > 1 for before, after in itertools.pairwise(places))
    assert heard.index("long") >= pieces
