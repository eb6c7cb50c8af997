import pytest

from kvtool.evaluation.costs import relative, spent_by_variant, spent_on
from tests.report.examples import cost, document, result, variants

FULL, H2O = variants({"h2o": 0.5}, (64,))


def test_costs_are_means_over_samples_not_over_tasks():
    few = result(H2O, "a", 1.0, 1.0, n=1, cost=cost(H2O, prompt=100, new=10))
    many = result(H2O, "b", 1.0, 1.0, n=3, cost=cost(H2O, prompt=500, new=20))
    samples = [few.cost] + 3 * [many.cost]  # as if each sample were listed
    spent = spent_on([few, many])
    assert spent.tasks == ("a", "b")
    for name in ("kv_bytes", "state_bytes", "full_bytes", "prefill_s"):
        slow = sum(getattr(c, name) for c in samples) / 4
        assert getattr(spent, name) == pytest.approx(slow)
    seconds = sum(c.prefill_s for c in samples)
    assert spent.prefill_rate == pytest.approx(sum(c.prompt_tokens for c in samples) / seconds)
    seconds = sum(c.decode_s for c in samples)
    assert spent.decode_rate == pytest.approx(sum(c.new_tokens for c in samples) / seconds)
    assert spent.share(spent.kv_bytes) == pytest.approx(spent.kv_bytes / spent.full_bytes)


def test_one_task_keeps_its_own_rate():
    unlike = cost(H2O).model_copy(update={"decode_tokens_per_s": 123.0})  # counted differently
    assert spent_on([result(H2O, "a", 1.0, 1.0, cost=unlike)]).decode_rate == pytest.approx(123.0)


def test_what_was_not_measured_is_none():
    assert spent_on([result(H2O, "a", 1.0, 1.0, cost=None)]) is None
    untimed = cost(H2O).model_copy(update={"decode_tokens_per_s": None, "decode_s": 0.0})
    spent = spent_on([result(H2O, "a", 1.0, 1.0, cost=untimed)])
    assert spent.decode_rate is None
    assert relative("decode_rate", spent, spent) is None


def test_speed_is_compared_on_the_same_tasks_only():
    run = document(("niah", "ppl"), {"h2o": 1}, (64,))
    spent = spent_by_variant(run)
    assert relative("decode_rate", spent["h2o@64"], spent["full"]) == pytest.approx(44 / 40)
    partial = run.model_copy(update={"results": run.results[:-1]})
    spent = spent_by_variant(partial)
    assert spent["h2o@64"].tasks == ("niah",)
    assert relative("decode_rate", spent["h2o@64"], spent["full"]) is None
