"""What a document says of a variant."""

from kvtool.evaluation.pairs import variant_entry
from kvtool.evaluation.run.index import read_variant
from kvtool.planning.variants import make_variants
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget


def test_an_arm_tells_whether_its_budget_is_what_is_read():
    for policy, reads in [
        ("h2o", False),
        ("snapkv", False),
        ("quest", True),
        ("exact-topk", True),
        ("rocketkv", True),
    ]:
        full, arm = make_variants([parse_policy(policy)], [Budget.parse(64)])
        assert variant_entry(arm).reads == reads
        assert not variant_entry(full).reads
        assert read_variant(variant_entry(arm), None) == arm


def test_an_arm_tells_in_what_its_slots_are_stored():
    for policy, codec in [
        ("h2o", None),
        ("full+int8", "int8"),
        ("h2o+caote+fp8", "fp8"),
        ("snapkv+int4(rotate=false)+ada", "int4(rotate=false)"),
    ]:
        full, arm = make_variants([parse_policy(policy)], [Budget.parse(64)])
        entry = variant_entry(arm)
        assert entry.codec == codec
        assert codec is None or entry.policy.endswith(f"+{codec}")
        assert variant_entry(full).codec is None
        assert read_variant(entry, None) == arm
