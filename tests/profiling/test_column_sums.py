import math

import pytest
import torch

import kvtool
from kvtool.generation import prefill
from kvtool.kernels import reference, trust
from kvtool.maths.attention import attention_weights, visible_keys
from kvtool.profiling import measure
from kvtool.profiling.column_sums import Density, column_entropy, column_sums, f_variance
from kvtool.profiling.request import DEFAULT, Plan
from kvtool.profiling.seen import Seen, row_weights
from tests.kernels import torch_kernels
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.pretend_device import DEVICE, Launches, as_kernel, pretended, put
from tests.profiling.watching import full_attention, watch

WORKED = torch.tensor([2.5, 0.7, 0.6, 0.2])  # column sums of four rows


def test_the_worked_variance():
    assert f_variance(WORKED).item() == pytest.approx(0.785)
    assert f_variance(WORKED).item() / 3 == pytest.approx(0.261667, abs=1e-6)


def test_the_worked_entropy():
    assert column_entropy(WORKED).item() == pytest.approx(0.745243, abs=1e-6)
    assert column_entropy(WORKED).item() * math.log(4) == pytest.approx(1.033127, abs=1e-6)


def test_a_sink_makes_the_variance_grow_with_the_length():
    """Every row gives a share to the first token and the rest evenly to all that it sees."""
    for share, expected in [
        (0.0, [0.987, 0.996, 0.999]),
        (0.1, [6.956, 22.573, 84.265]),
        (0.5, [130.905, 515.6, 2052.294]),
        (0.8, [328.941, 1312.424, 5245.028]),
    ]:
        found = []
        for n in (512, 2048, 8192):
            evenly = 1 / torch.arange(1, n + 1, dtype=torch.float64)
            sums = (1 - share) * evenly.flip(0).cumsum(0).flip(0)
            sums[0] += share * n
            found.append(f_variance(sums.float()).item())
        assert found == pytest.approx(expected, rel=1e-3)


def test_the_extremes():
    assert column_entropy(torch.ones(9)).item() == pytest.approx(1.0)
    assert column_entropy(torch.tensor([9.0, 0.0, 0.0])).item() == 0.0
    assert column_entropy(torch.ones(1)).item() == 1.0
    assert f_variance(torch.ones(9)).item() == 0.0


@pytest.mark.parametrize("special", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("rows", "keys"), [(5, 17), (1, 13), (17, 17)])
def test_rows_are_those_of_masked_attention(rows, keys, special):
    torch.manual_seed(rows * keys)
    query, key = torch.randn(2, 3, rows, 7), torch.randn(2, keys, 7)
    extra = {"softcap": 2.0} if special == "softcap" else {}
    if special == "sinks":
        extra["sinks"] = torch.randn(2, 3)
    for window in (None, 1, 4, 9, 30):
        check_rows(query, key, window, extra)


def check_rows(query, key, window, extra):
    rows, keys = query.shape[2], key.shape[1]
    positions = torch.arange(keys)[None]
    visible = visible_keys(positions[:, keys - rows :], positions[:, None], window)
    expected = attention_weights(query[None], key[None], scale=0.5, visible=visible, **extra)[0]
    weights, low = row_weights(query, key, scale=0.5, window=window, **extra)
    torch.testing.assert_close(weights, expected[..., low:])
    assert not expected[..., :low].any()
    assert low == (0 if window is None else max(0, keys - rows - window + 1))


def column_sums_by_loops(rows):
    sums = [0.0] * len(rows)
    for row in rows:
        for j, weight in enumerate(row.tolist()):
            sums[j] += weight
    return sums


def test_every_head_of_a_model_equals_plain_loops():
    model = kvtool.attach(peaky_model("llama"))
    n, study = 300, Density()  # more than one chunk of rows
    seen = watch(model, random_ids(n), 3, study)
    found = study.results()
    for layer in (0, 1):
        for head, rows in enumerate(full_attention(seen, layer, 16**-0.5)):
            sums = column_sums_by_loops(rows[:n])
            assert sum(sums) == pytest.approx(n, rel=1e-5)
            variance = sum(s * s for s in sums) / n - 1
            entropy = -sum(s / n * math.log(s / n) for s in sums) / math.log(n)
            assert found["f_variance"][layer][head].item() == pytest.approx(variance, rel=1e-4)
            assert found["entropy"][layer][head].item() == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_other_families_are_seen(name):
    model, study = kvtool.attach(family_model(name)), Density()
    watch(model, random_ids(60), 0, study)
    found = study.results()["entropy"]
    assert list(found) == ([1, 3] if name == "qwen3_next" else [0, 1, 2, 3])
    for layer in found.values():
        assert layer.shape == (4,)
        assert ((layer > 0) & (layer <= 1)).all()


def told(monkeypatch, model, ids):
    """The column sums of every layer, and how often the kernel returned their log-sum-exp."""
    found, told_by = {}, []
    own = column_sums

    def noted(seen):
        told_by.append(seen.lse is not None)
        found.setdefault(seen.layer, []).append(own(seen))
        return found[seen.layer][-1]

    monkeypatch.setattr("kvtool.profiling.column_sums.column_sums", noted)
    with torch.inference_mode():
        cache, studies = kvtool.build_cache(model, "full"), [Density() for _ in ids]
        cache.watch_steps(
            lambda *step: [study.see(Seen(*step, row)) for row, study in enumerate(studies)]
        )
        prefill(model, cache, ids)
    return found, told_by


def test_sums_from_the_kernels_log_sum_exp_are_those_of_weights(monkeypatch):
    """Two texts, more than one tile each; the same without a log-sum-exp."""
    monkeypatch.setattr("kvtool.cache.steps.attend_block.LONG_PROMPT", 600)
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(600, batch=2)
    ours, told_by = told(monkeypatch, model, ids)
    assert told_by == [True] * 4
    monkeypatch.setattr("kvtool.cache.steps.attend_block.can_sum", lambda *_: False)
    plain, told_by = told(monkeypatch, model, ids)
    assert told_by == [False] * 4
    assert ours.keys() == plain.keys() == {0, 1}
    for layer, texts in ours.items():
        for sums, weighed in zip(texts, plain[layer], strict=True):
            torch.testing.assert_close(sums, weighed, atol=1e-4, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "fused"),
    [("llama", True), ("gemma2", False), ("gpt_oss", False), ("deepseek_v3", True)],
)
def test_kernels_of_a_gpu_sum_what_weights_sum(monkeypatch, family, fused):
    """Fused: torch's own kernel attends, or kvtool's under soft caps and sinks, with windows."""
    pytest.importorskip("triton")
    model, ids = family_model(family), random_ids(29, batch=2)
    model.config._attn_implementation = model.config._attn_implementation.replace("eager", "sdpa")
    plain, told_by = told(monkeypatch, kvtool.attach(model), ids)
    assert not any(told_by)
    attended = []
    torch_kernels.put_in_place(monkeypatch, lambda kernel: noted(kernel, attended))
    monkeypatch.setattr(trust, "usable", lambda *_, **__: True)
    ours, told_by = told(monkeypatch, model, ids)
    assert all(told_by)
    assert len(attended) == (len(ours) if fused else 0)
    for layer, texts in ours.items():
        for sums, weighed in zip(texts, plain[layer], strict=True):
            torch.testing.assert_close(sums, weighed, atol=1e-4, rtol=1e-4)


def noted(kernel, calls: list):
    return lambda *args, **options: calls.append(1) or kernel(*args, **options)


def profiled(monkeypatch, layers: int, n: int) -> Launches:
    """What a GPU would launch for a profile of a text, its forward included."""
    model = peaky_model("llama", num_hidden_layers=layers, head_dim=16).to(torch.bfloat16)
    model, launches = kvtool.attach(put(model)), Launches()
    torch_kernels.put_in_place(monkeypatch, lambda kernel: as_kernel(kernel, launches))
    sums = as_kernel(reference.column_sums, launches)
    monkeypatch.setattr("kvtool.kernels.column_sums.column_sums", sums)
    monkeypatch.setattr(trust, "usable", lambda *_, **__: True)
    with pretended():
        ids = random_ids(n).to(DEVICE)
        with launches:
            measure.measure(model, [ids], Plan(tuple(DEFAULT), 0, None))
    return launches


def test_a_gpu_launches_few_operators_for_a_profile_however_long_the_text(monkeypatch):
    """Fewer than 60 a layer are not the model's; attention and what is around it are among them."""
    pytest.importorskip("triton")
    monkeypatch.setattr(measure, "_read", torch.no_grad()(measure._read.__wrapped__))
    two, four = (profiled(monkeypatch, layers, 300) for layers in (2, 4))
    assert (four.own.total() - two.own.total()) / 2 <= 58
    assert four.own["flash"] == four.own["column_sums"] == 4
    assert profiled(monkeypatch, 2, 600).names == two.names


def test_only_a_whole_prompt_is_told(monkeypatch):
    """Of a prompt that a layer reads in blocks, no log-sum-exp would be that of all rows."""
    model, ids, seen = kvtool.attach(peaky_model("llama")), random_ids(60), []
    cache = kvtool.build_cache(model, "streaming", 40, prefill="block:16")
    cache.watch_steps(lambda *step: seen.append(Seen(*step)))
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    assert [(each.query.shape[1], each.lse) for each in seen] == [(60, None)] * 2
