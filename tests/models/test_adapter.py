"""Adapter folders: named as what they are, and merged into their base where peft is installed."""

import importlib.util
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvtool
from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.models import reference
from kvtool.models.folder import check_folder
from kvtool.models.load import load, load_config, load_tokenizer, read_config

LAYER = "model.layers.0.self_attn.q_proj"
PEFT = '''
"""Enough of peft to merge LoRA weights, written for these tests."""

import json
from pathlib import Path

from safetensors.torch import load_file


class PeftModel:
    def __init__(self, model, folder):
        self.model, self.folder = model, Path(folder)

    @classmethod
    def from_pretrained(cls, model, folder):
        return cls(model, folder)

    def merge_and_unload(self):
        settings = json.loads((self.folder / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"]
        weights = load_file(self.folder / "adapter_model.safetensors")
        for name, down in weights.items():
            if ".lora_A." in name:
                up = weights[name.replace(".lora_A.", ".lora_B.")]
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                self.model.get_submodule(path).weight.data += scale * up @ down
        return self.model
'''


@pytest.fixture
def base(tmp_path):
    return shutil.copytree(reference.path(), tmp_path / "base")


@pytest.fixture
def adapter(tmp_path, base):
    """A folder with a LoRA adapter of the first layer's queries, as peft saves one."""
    folder = tmp_path / "lora"
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    out, into = load_file(base / "model.safetensors")[f"{LAYER}.weight"].shape
    torch.manual_seed(0)
    tensors = {
        f"base_model.model.{LAYER}.lora_A.weight": torch.randn(2, into),
        f"base_model.model.{LAYER}.lora_B.weight": torch.randn(out, 2),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def peft(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "peft"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PEFT)
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("peft")}
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    sys.modules.pop("peft", None)
    sys.modules.update(before)


@pytest.fixture
def no_peft(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else found(name)
    )


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_without_peft_an_adapter_is_named_with_its_base(adapter, base, no_peft):
    told = f"model folder `{adapter}` is an adapter (LORA) of `{base}`, and the package peft, "
    for call in (load, load_tokenizer, load_config, check_folder, read_config):
        with pytest.raises(UsageError) as caught:
            call(str(adapter))
        assert caught.value.message.startswith(told)
        assert "pip install peft" in caught.value.hint
    for call in (kvtool.generate, kvtool.compress, kvtool.profile):
        with pytest.raises(UsageError, match="is an adapter"):
            call(str(adapter))
    with pytest.raises(UsageError, match="is an adapter"):
        kvtool.plan(str(adapter), tokens=64, context=1024)
    with pytest.raises(UsageError, match="is an adapter"):
        kvtool.evaluate(str(adapter), tasks=["niah"], policies=["h2o"], budgets=["64"])


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_by_its_name(adapter, peft, file):
    (adapter / file).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=rf"{file}` is a pointer of Git LFS"):
        check_folder(str(adapter))


def merged(adapter, base):
    """The base's weights with the adapter's, by hand."""
    weights = load_file(base / "model.safetensors")
    down, up = (
        load_file(adapter / "adapter_model.safetensors")[
            f"base_model.model.{LAYER}.lora_{side}.weight"
        ]
        for side in "AB"
    )
    weights[f"{LAYER}.weight"] = weights[f"{LAYER}.weight"].float() + 3.0 * up @ down
    return weights


def check_merged(adapter, base):
    loaded, plain = load(str(adapter), dtype="float32"), load(str(base), dtype="float32")
    assert (loaded.name, loaded.model.name_or_path) == (str(adapter), str(adapter))
    assert loaded.config_hash == plain.config_hash
    plain.model.load_state_dict(merged(adapter, base), strict=False)
    for (name, ours), theirs in zip(
        loaded.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5), name
        assert not ours.requires_grad
    ids = loaded.tokenizer("The secret code", return_tensors="pt").input_ids
    expected = plain.model(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-3)
    assert not torch.allclose(expected, load(str(base)).model(ids).logits, atol=0.1)
    answer = kvtool.generate(str(adapter), "The secret code", policy="full", max_new_tokens=3)
    again = kvtool.generate(
        plain.model, "The secret code", policy="full", max_new_tokens=3, tokenizer=plain.tokenizer
    )
    assert (answer.token_ids, answer.model) == (again.token_ids, str(adapter))


def test_an_adapter_is_merged_into_its_base(adapter, base, peft):
    check_merged(adapter, base)


@pytest.mark.exhaustive
def test_an_adapter_is_merged_by_peft_itself(adapter, base):
    pytest.importorskip("peft")
    check_merged(adapter, base)


def test_an_adapters_own_tokenizer_goes_first(adapter, base, peft):
    name = "tokenizer_config.json"
    settings = json.loads((base / name).read_text()) | {"chat_template": "of the adapter"}
    assert load_tokenizer(str(adapter))[0].chat_template is None
    shutil.copy(base / "tokenizer.json", adapter)
    (adapter / name).write_text(json.dumps(settings))
    assert load_tokenizer(str(adapter))[0].chat_template == "of the adapter"
    assert load(str(adapter)).tokenizer.chat_template == "of the adapter"


def test_a_plan_for_an_adapter_is_one_for_its_base(adapter, base, peft):
    plan = kvtool.plan(str(adapter), tokens=64, context=1024)
    assert plan.layers == kvtool.plan(str(base), tokens=64, context=1024).layers


def test_adapters_that_cannot_be_merged_are_refused(adapter, base, peft, tmp_path):
    edit(adapter, peft_type="PREFIX_TUNING")
    with pytest.raises(UsageError, match="which adds keys and values of its own"):
        load(str(adapter))
    edit(adapter, peft_type="LORA", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"`.*gone` does not exist"):
        load(str(adapter))
    edit(adapter, base_model_name_or_path=str(adapter))
    with pytest.raises(UsageError, match="which is an adapter itself"):
        load(str(adapter))
    edit(adapter, base_model_name_or_path=None)
    with pytest.raises(UsageError, match="does not say which model the adapter belongs to"):
        load(str(adapter))
    (adapter / "adapter_config.json").write_text("[")
    with pytest.raises(UsageError, match="does not say which model the adapter belongs to"):
        load(str(adapter))


def test_an_adapter_that_does_not_fit_is_one_line(adapter, base, peft):
    tensors = load_file(adapter / "adapter_model.safetensors")
    cut = {name: each[:, :1].contiguous() for name, each in tensors.items()}
    save_file(cut, adapter / "adapter_model.safetensors")
    with pytest.raises(KvtoolError, match=f"adapter of model `{adapter}`"):
        load(str(adapter))


def test_a_folder_with_both_is_a_model(adapter, base, no_peft):
    shutil.copytree(base, adapter, dirs_exist_ok=True)
    check_folder(str(adapter))
    assert config_hash(load_config(str(adapter))) == config_hash(load_config(str(base)))
