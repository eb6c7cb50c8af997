import pytest

from kvtool import parse_policy
from kvtool.errors import UsageError


def test_evicts_nothing():
    assert parse_policy("full").score.when == "never"


@pytest.mark.parametrize("modifier", ["caote", "fastcaote"])
def test_refuses_modifiers(modifier):
    with pytest.raises(UsageError, match=f"`{modifier}` weighs values by .* `full` has none"):
        parse_policy(f"full+{modifier}")
