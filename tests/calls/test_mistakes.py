"""What Python calls are given by mistake: one clear line, before any weights are loaded."""

import pytest

import kvtool
from tests.models_for_tests import family_model

POLICY = "a policy is a string or a kvtool policy, got `None`; h2o"
FLOAT = "budget ratio 512.0 is above 1 .100%.; .* tokens are whole, such as 512"
BOTH = [
    ({"policy": None}, POLICY),
    ({"policy": 5}, "got `5`"),
    ({"policy": "h2oo"}, "no policy named `h2oo`"),
    ({"policy": "h2o", "budget": 512.0}, FLOAT),
    ({"policy": "h2o", "budget": [3]}, r"budget `\[3\]` is not a size"),
    ({"policy": "h2o", "budget": True}, "budget `True` is not a size"),
    ({"model": 5}, "a model is a folder, a hub ID or a loaded model of transformers, got int"),
    ({"model": "./none"}, "model folder `./none` does not exist"),
    ({"prompt": 5}, "prompt must be text, got `5`"),
    ({"prompt": " "}, "--prompt is empty"),
    ({"prompt": "a", "prompt_file": "b"}, "cannot read prompt file `b`: No such file"),
    ({"plan": 5}, "a plan or recipe is a document, its data or its file, got int"),
    ({"chat_template": "maybe"}, "chat_template must be `auto`, `on` or `off`, got `maybe`"),
    ({"seed": -1}, "seed must be at least 0, got `-1`"),
    ({"dtype": "float9"}, "dtype must be `auto`, `float32`"),
    ({"attn_implementation": "fast"}, "attn_implementation must be `auto`, `eager`"),
    ({"save": 5}, "save must be text.*, got `5`"),
    ({"save": "no/such/x.safetensors"}, "folder `no/such` does not exist"),
]
GENERATE = [
    ({"cache": 5}, "cache must be a kvtool cache or its file, got int"),
    ({"cache": "none.safetensors"}, "cache file `none.safetensors` does not exist"),
    ({"turns": 5}, "turns must be a file or a list, got `5`"),
    ({"turns": []}, "turns hold no turn"),
    ({"turns": ["a"], "prompt": "b", "prompt_file": "c"}, "do not go together"),
    ({"turns": [5]}, "turns: a turn is text, got `5`"),
    ({"turns": [{"user": "a", "assistant": "b"}]}, "got `user`, `assistant`"),
    ({"temperature": "hot"}, "temperature must be a number.*, got `hot`"),
    ({"temperature": -1}, "--temperature must be 0 or more, got -1"),
    ({"stop": 5}, "stop must be text, got `5`"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be .*a whole number.*, got `2.5`"),
    ({"max_new_tokens": 0}, "--max-new-tokens must be 1 or more, got 0"),
    ({"cache": "none", "system": "Be short."}, "--system goes before everything"),
]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr("kvtool.models.attached.load", lambda *a, **k: pytest.fail("loaded"))


def refused(call, message, **settings):
    with pytest.raises(kvtool.UsageError, match=message) as error:
        call(**settings)
    assert "\n" not in str(error.value)


def test_generate():
    for settings, message in BOTH + GENERATE:
        given = {"prompt": "The lamp"} | settings
        if {"cache", "turns"} & settings.keys() and "prompt" not in settings:
            del given["prompt"]
        refused(kvtool.generate, message, **given)


def test_compress():
    for settings, message in [*BOTH, ({"prompt": None}, "no prompt")]:
        refused(kvtool.compress, message, **{"prompt": "The lamp", "policy": "h2o"} | settings)
    refused(kvtool.compress, "no policy; --policy", prompt="The lamp")


def test_unknown_keywords_are_refused():
    for call in (kvtool.generate, kvtool.compress):
        told = f"{call.__name__}.. got an unexpected keyword .*'polcy'"
        with pytest.raises(TypeError, match=told):
            call(None, "The lamp", polcy="h2o")


def test_evaluate():
    for settings, message in [
        ({"policies": [None]}, "a policy is a string or a kvtool policy, got `None`"),
        ({"policies": "h2o", "budgets": 512.0}, FLOAT),
        ({"policies": "h2o", "budgets": [[3]]}, r"budget `\[3\]` is not a size"),
        ({"recipe": 5}, "a model is a folder, a hub ID or a loaded model of transformers, got int"),
    ]:
        refused(kvtool.evaluate, message, tasks="niah", **settings)


def test_profile():
    for settings, message in [
        ({"policy": 5, "metrics": "output_error"}, "a policy is a string or a kvtool policy"),
        ({"budgets": [512.0], "metrics": "output_error"}, FLOAT),
        ({"model": 5}, "a model is a folder, a hub ID or a loaded model of transformers, got int"),
    ]:
        refused(kvtool.profile, message, **settings)


def test_build_cache():
    model = family_model("llama")
    for policy, budget, message in [
        (None, 32, POLICY),
        ("h2o", 512.0, FLOAT),
        ("h2o", None, "needs a budget"),
    ]:
        refused(kvtool.build_cache, message, model=model, policy=policy, budget=budget)
