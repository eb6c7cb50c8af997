"""The newest queries of a layer, token by token, with padding between them."""

import pytest
import torch

from kvtool.cache.features.queries import QueryWindow

ROWS, HEADS, DIM = 3, 2, 4


def newest(seen):
    """Of one entry's (query, position) pairs, the last ones by position, lowest first."""
    return sorted((pair for pair in seen if pair[1] >= 0), key=lambda pair: pair[1])[-ROWS:]


def held(window, entry):
    """The queries of an entry that are there, lowest position first."""
    tensors = window.tensors()
    positions = tensors["window.positions"][entry].tolist()
    queries = tensors["window.query"][entry]
    return [(queries[:, i], position) for i, position in enumerate(positions) if position >= 0]


@pytest.mark.parametrize("prompt", [1, 2, 5])
def test_each_entry_keeps_its_own_newest_queries(prompt):
    """Entry 0 has a token at every step; the others have padding at some of them."""
    generator = torch.Generator().manual_seed(prompt)
    window = QueryWindow(ROWS)
    query = torch.randn(3, HEADS, prompt, DIM, generator=generator)
    places = torch.stack([torch.arange(prompt), torch.arange(prompt) - 1, torch.arange(prompt)])
    places[1].clamp_(min=-1)
    window.see(query, places, 0.5, None)
    seen = [
        [(query[entry, :, i], int(places[entry, i])) for i in range(prompt)] for entry in range(3)
    ]
    following = (places.amax(1) + 1).tolist()
    there = [[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]]
    for step in there:
        token = torch.randn(3, HEADS, 1, DIM, generator=generator)
        places = [place if real else -1 for place, real in zip(following, step, strict=True)]
        window.see_token(token, torch.tensor(places)[:, None], 0.5, None)
        following = [place + real for place, real in zip(following, step, strict=True)]
        for entry in range(3):
            seen[entry].append((token[entry, :, 0], places[entry]))
            expected, found = newest(seen[entry]), held(window, entry)
            assert [place for _, place in found] == [place for _, place in expected]
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, expected, strict=True))
