"""Reading policy strings: what the case of letters means."""

from dataclasses import dataclass

from kvtool.policies.grammar import _read_arguments, parse_policy


@dataclass(frozen=True)
class Reader:
    basis: str
    rank: int | None = 3


def test_names_keys_and_choices_may_be_written_in_any_case():
    assert str(parse_policy("H2O( Recent = 8 )+CAOTE")) == "h2o(recent=8)+caote"
    assert str(parse_policy("SnapKV(Pool=AVG)")) == "snapkv(pool=avg)"
    assert str(parse_policy("RoCo(scope=None,SINKS=1)")) == "roco(sinks=1)"


def test_a_path_keeps_its_case():
    given = _read_arguments("reader", Reader, "Basis=/tmp/My Model.PT, RANK=None")
    assert given == {"basis": "/tmp/My Model.PT", "rank": None}
