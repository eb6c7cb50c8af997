import pytest
import torch

import kvtool
from kvtool.errors import KvtoolError, UsageError
from kvtool.policies.grammar import parse_policy
from kvtool.profiling import measure as module
from kvtool.profiling.measure import measure
from kvtool.profiling.request import DEFAULT, METRICS, Plan, parse_metrics
from kvtool.profiling.summary import summarise
from tests.models_for_tests import family_model, peaky_model, random_ids

ALL = METRICS[:-1]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


def texts(count, n=70):
    return [random_ids(n, seed=i) for i in range(count)]


def test_texts_that_are_read_together_count_like_each_alone(model, monkeypatch):
    apart = {"output_error", "key_basis"}  # components of all texts are no mean of each one's
    plan = Plan(tuple(name for name in ALL if name not in apart), 20)
    together = measure(model, texts(3), plan)
    monkeypatch.setattr(module, "_BATCH", 1)
    alone = [measure(model, [ids], plan) for ids in texts(3)]
    for name, values in together.items():
        mean = torch.stack([each[name] for each in alone]).mean(0)
        torch.testing.assert_close(values, mean, rtol=1e-4, atol=1e-5)


def test_every_metric_has_a_number_per_layer(model):
    plan = Plan(ALL, 5, parse_policy("h2o"), (20, 40))
    done = []
    found = measure(model, texts(2), plan, done.append)
    assert done == [1, 2]
    assert found["f_variance"].shape == (2, 8)
    assert found["query_cosine"].shape == (2, 8, 64)
    assert found["topk_union"].shape == (2, 8, 5)
    assert found["topk_union_group"].shape == (2, 2, 5)
    assert found["jaccard_mas"].shape == (2, 2, 4)
    assert found["output_error"].shape == (2, 1, 2)
    metrics, curves = summarise(found, plan)
    for name in ("f_variance", "entropy", "query_cosine", "recompute_frequency", "robustness"):
        assert len(getattr(metrics, name)) == 2
    assert metrics.f_variance == pytest.approx(found["f_variance"].mean(1).tolist(), rel=1e-5)
    assert metrics.output_error.budgets == [20, 40]
    for small, large in metrics.output_error.errors:
        assert small > large > 0
    assert curves.query_cosine.distances == [1, 2, 4, 8, 16, 32, 64]
    assert [row[0] for row in curves.query_cosine.values] == metrics.query_cosine
    assert curves.topk_union.steps == [1, 2, 4, 5]
    assert [row[-1] for row in curves.topk_union.values] == metrics.topk_union
    assert curves.recompute_frequency.queries == "prompt"
    for point in curves.recompute_frequency.grid:
        assert point.recompute <= point.calibrate
        assert point.calibrate + point.idle == pytest.approx(1.0, abs=1e-5)


def test_nothing_is_generated_for_prompts_alone(model):
    assert Plan(("f_variance", "entropy"), 20).steps == 0
    assert Plan(("f_variance", "topk_union"), 20).steps == 20


def test_output_errors_are_those_of_the_benchmark(model):
    from kvtool.profiling.output_error import output_error

    found = measure(model, texts(1), Plan(("output_error",), 9, parse_policy("tova"), (24,)))[
        "output_error"
    ]
    cache, full = kvtool.build_cache(model, "tova", 24), kvtool.build_cache(model, "full")
    answer = kvtool.generation.prefill(model, full, texts(1)[0]).argmax(-1)
    tokens = [answer]
    for _ in range(8):
        tokens.append(kvtool.generation.decode_step(model, full, tokens[-1]).argmax(-1))
    expected = output_error(model, cache, texts(1)[0], torch.stack(tokens, 1))
    assert found[:, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_layers_without_attention_or_with_a_window_have_no_number():
    plan = Plan(("f_variance", "topk_union"), 3)
    metrics, _ = summarise(measure(kvtool.attach(family_model("lfm2")), texts(1), plan), plan)
    assert [value is None for value in metrics.f_variance] == [True, False, True, False]
    metrics, _ = summarise(measure(kvtool.attach(family_model("gemma3")), texts(1), plan), plan)
    assert None not in metrics.f_variance
    assert [value is None for value in metrics.topk_union] == [True, False, True, False]
    model = kvtool.attach(family_model("mistral-window"))
    metrics, curves = summarise(measure(model, texts(1), plan), plan)
    assert metrics.topk_union == [None] * 4
    assert curves.topk_union.values == [None] * 4


def test_models_that_show_nothing_are_refused():
    model = kvtool.attach(family_model("falcon"))
    with pytest.raises(KvtoolError, match="`falcon` does not show its queries and keys"):
        measure(model, texts(1), Plan(DEFAULT, 3))
    model = kvtool.attach(family_model("deepseek_v3"))
    with pytest.raises(KvtoolError, match="latent"):
        measure(model, texts(1), Plan(("output_error",), 3, parse_policy("h2o"), (20,)))
    assert measure(model, texts(1), Plan(DEFAULT, 3))["entropy"].isfinite().all()


def test_names_are_put_in_order_and_checked():
    assert parse_metrics(" topk-union, ENTROPY,entropy") == ("entropy", "topk_union")
    with pytest.raises(UsageError, match="no metric `entropie`") as caught:
        parse_metrics("f_variance,entropie")
    assert caught.value.hint == "did you mean `entropy`?"
    with pytest.raises(UsageError, match="names nothing"):
        parse_metrics(",")


@pytest.mark.parametrize("name", ["entropy", "query_cosine", "topk_union", "robustness"])
def test_what_is_held_at_a_time_grows_with_the_length_and_not_its_square(model, name):
    peaks = []
    for n in (1024, 2048):
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                nonlocal largest
                out = function(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor):
                    largest = max(largest, out.untyped_storage().nbytes())
                return out

        from tests.profiling.watching import watch

        studies = module.make_studies(model, Plan((name,), 2, parse_policy("h2o")), n + 2)
        with Watch():
            watch(model, random_ids(n), 2, *studies)
        peaks.append(largest)
    assert peaks[1] <= 2.1 * peaks[0]
