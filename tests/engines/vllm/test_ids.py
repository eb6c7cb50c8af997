"""Virtual ids: distinct, stable, and recognised without their file."""

import hashlib

import pytest

from kvtool.engines.vllm.ids import FEWEST, NAMING, are_virtual, checking_ids, virtual_ids

WORKED = [
    *(14938, 3057, 32223, 42991, 45634, 39267, 9310, 43529),
    *(21547, 28573, 5042, 1406, 9317, 34432),
]  # by sha256sum of "book:0:0", "book:0:1", "kvtool:..:0", "book:rest:0"


def slow_ids(digest, count, vocabulary):
    """The ids by the rule, one by one, where nothing is avoided."""

    def draw(seed, count):
        found, i = [], 0
        while len(found) < count:
            block = hashlib.sha256(f"{seed}:{i}".encode()).hexdigest()
            found += [int(block[at : at + 16], 16) % vocabulary for at in (0, 16, 32, 48)]
            i += 1
        return found[:count]

    names = draw(f"{digest}:0", 8)
    checks = draw("kvtool:" + ",".join(map(str, names)), 4)
    return names + checks + draw(f"{digest}:rest", count - 12)


def test_ids_follow_the_rule():
    for vocabulary in (96, 49152, 262144):
        assert virtual_ids("a", 40, vocabulary) == slow_ids("a", 40, vocabulary)


def test_a_worked_example():
    assert virtual_ids("book", 14, 49152) == WORKED


@pytest.mark.parametrize("vocabulary", [96, 49152])
def test_every_file_has_a_name_of_its_own_which_is_recognised(vocabulary):
    names = set()
    for i in range(200):
        ids = virtual_ids(f"file {i}", 30, vocabulary, avoid={0, 1, 2, 50})
        assert len(ids) == 30
        assert all(0 <= each < vocabulary for each in ids)
        assert not {0, 1, 2, 50} & set(ids)
        assert are_virtual(ids, vocabulary)
        assert are_virtual([*ids[:FEWEST], 7], vocabulary)
        names.add(tuple(ids[:NAMING]))
    assert len(names) == 200


def test_text_is_not_virtual():
    ids = virtual_ids("file", 30, 512)
    for i in range(FEWEST):
        assert not are_virtual([*ids[:i], (ids[i] + 1) % 512, *ids[i + 1 :]], 512)
    assert not are_virtual(ids[: FEWEST - 1], 512)
    assert not are_virtual([], 512)
    assert not are_virtual(ids[1:], 512)
    assert not are_virtual(list(range(100)), 512)


def test_a_checksum_that_would_hold_a_special_token_draws_another_name():
    plain = virtual_ids("file", FEWEST, 96)
    special = plain[NAMING]
    other = virtual_ids("file", FEWEST, 96, avoid={special})
    assert special not in other
    assert other[NAMING:] == checking_ids(other[:NAMING], 96)
