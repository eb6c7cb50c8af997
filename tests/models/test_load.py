import json
import shutil

import pytest
import torch

from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.models import reference
from kvtool.models.folder import check_folder
from kvtool.models.load import load, load_config
from kvtool.models.placement import check_attention, resolve_device, resolve_dtype


@pytest.fixture
def folder(tmp_path):
    """A folder of its own with the reference model in it."""
    return shutil.copytree(reference.path(), tmp_path / "model")


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def test_loads_the_reference_model_by_default():
    loaded = load()
    assert (loaded.name, loaded.revision) == ("reference", None)
    assert loaded.config_hash == config_hash(loaded.model.config)
    assert not loaded.model.training
    assert loaded.model.name_or_path == "reference"
    ids = loaded.tokenizer("The old lamp", return_tensors="pt").input_ids
    assert loaded.model(ids.to(loaded.model.device)).logits.isfinite().all()


def test_a_configuration_needs_neither_weights_nor_a_tokenizer(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    assert config_hash(load_config(str(alone))) == config_hash(load_config())
    with pytest.raises(UsageError, match="has no weights"):
        check_folder(str(alone))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_config(str(tmp_path))


def test_loads_a_folder_as_the_same_model(folder):
    loaded, bundled = load(str(folder)), load("reference")
    assert loaded.name == str(folder)
    assert loaded.config_hash == bundled.config_hash
    for ours, theirs in zip(loaded.model.parameters(), bundled.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_dtype_is_float32_on_a_cpu_unless_asked():
    assert load(device="cpu").model.dtype == torch.float32
    assert load(device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda:1") == "auto"
    assert resolve_dtype("float16", "cpu") == "float16"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model", "model folder `/nowhere/model` does not exist"),
        ("./nowhere", "model folder `./nowhere` does not exist"),
        (" ", "the model name is empty"),
        ("not a name", "no folder `not a name` here, and no model of that name on the hub"),
    ],
)
def test_refuses_a_model_that_is_not_there(model, message):
    with pytest.raises(UsageError, match=message):
        load(model)


@pytest.mark.exhaustive
def test_a_hub_that_cannot_be_reached_is_said():
    with pytest.raises(KvtoolError, match="no folder `some/model` here, and the hub cannot be"):
        load("some/model")


def test_refuses_a_file(folder):
    with pytest.raises(UsageError, match=r"model `.*config.json` is a file"):
        check_folder(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"model folder `.*` has no config.json"),
        ("model.safetensors", r"model folder `.*` has no weights \(no model.safetensors\)"),
        ("tokenizer*", r"model folder `.*` has no tokenizer"),
    ],
)
def test_refuses_a_folder_that_lacks_a_file(folder, file, message):
    for path in folder.glob(file):
        path.unlink()
    with pytest.raises(UsageError, match=message):
        check_folder(str(folder))


def test_refuses_a_folder_that_lacks_a_shard(folder):
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UsageError, match=r"lacks 1 of 2 weight files \(first: model-2.safetens"):
        check_folder(str(folder))
    index.write_text("[]")
    with pytest.raises(UsageError, match=r"index.json` is not an index of weight files"):
        check_folder(str(folder))


@pytest.mark.parametrize(
    ("place", "kind", "whole"),
    [
        *(("../model-1.safetensors", "model.safetensors", False),),
        *(("absolute", "pytorch_model.bin", True), ("link", "model.safetensors", True)),
        *(("a/../../b", "pytorch_model.bin", False), (3, "model.safetensors", False)),
    ],
)
def test_refuses_an_index_that_points_outside_of_its_folder(folder, place, kind, whole):
    outside = folder.parent / "model-1.safetensors"
    outside.write_bytes((folder / "model.safetensors").read_bytes())
    if place == "absolute":
        place = str(outside)
    elif place == "link":
        (folder / place).symlink_to(outside)
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    if not whole:
        (folder / "model.safetensors").unlink()
    told = "is not an index" if place == 3 else "outside the model's folder"
    with pytest.raises(UsageError, match=told):
        check_folder(str(folder))


def test_takes_the_links_of_the_hubs_cache_and_no_others(folder, tmp_path):
    model = tmp_path / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    snapshot = shutil.copytree(folder, model / "snapshots" / "0123")
    (snapshot / "model.safetensors").rename(model / "blobs" / "sha")
    (snapshot / "one.safetensors").symlink_to("../../blobs/sha")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    check_folder(str(snapshot))
    (snapshot / "one.safetensors").unlink()
    (snapshot / "one.safetensors").symlink_to("../../sha")
    (model / "blobs" / "sha").rename(model / "sha")
    with pytest.raises(UsageError, match="outside the model's folder"):
        check_folder(str(snapshot))


def test_refuses_a_configuration_that_is_no_json(folder):
    (folder / "config.json").write_text('{"model_type":')
    with pytest.raises(UsageError, match=r"config.json` is not valid JSON: Expecting value"):
        check_folder(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "flubber"}, r"the architecture of model `.*` is not supported: .*flubber"),
        ({"model_type": "t5"}, r"model `.*` \(t5\) is not a causal language model"),
        ({"model_type": "mamba"}, r"`mamba` has no attention layers"),
        ({"num_hidden_layers": 6}, r"the weights of `.*` lack 18 tensors .*model.layers.4"),
        ({"hidden_size": 64}, r"do not fit its config.json: .* is \(\d+, 128\), must be \(\d+, 64"),
        ({"num_attention_heads": 3}, r"cannot read the configuration of model `.*128.*\(3\)"),
    ],
)
def test_refuses_a_configuration_that_cannot_run(folder, changes, message):
    with pytest.raises(KvtoolError, match=message) as refused:
        load(edit(folder, **changes))
    assert "\n" not in str(refused.value)


def test_code_in_a_checkpoint_is_not_run_unasked(folder):
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(
        UsageError, match="brings its own code, which is not run unasked"
    ) as refused:
        load(edit(folder, model_type="own", auto_map=own))
    assert "--trust-remote-code" in refused.value.hint


@pytest.mark.parametrize("size", [20, 50_000])
def test_refuses_truncated_weights(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(KvtoolError, match="cannot read the weights of model"):
        load(str(folder))


def test_refuses_a_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"x":')
    with pytest.raises(KvtoolError, match="cannot read the tokenizer of model"):
        load(str(folder))


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "a.gguf", "tokenizer.model"]
)
def test_a_pointer_of_git_lfs_is_called_by_its_name(folder, file):
    if file == "a.gguf":
        (folder / "model.safetensors").unlink()
    if file == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UsageError, match="is a pointer of Git LFS") as refused:
        check_folder(str(folder))
    assert f"`{folder / file}`" in str(refused.value)
    assert refused.value.hint == f"git -C {folder} lfs pull"


def test_a_shard_that_is_a_pointer_is_called_by_its_name(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"b\.safetensors` is a pointer of Git LFS"):
        check_folder(str(folder))


def test_a_pointer_that_nothing_reads_is_no_obstacle(folder):
    for file in ("pytorch_model.bin", "tokenizer.model", "picture.png"):
        (folder / file).write_text("version https://git-lfs.github.com/spec/v1\n")
    check_folder(str(folder))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x"])
def test_refuses_an_unknown_device(device):
    with pytest.raises(UsageError, match=f"no device `{device}`; choose auto, cpu"):
        resolve_device(device)


@pytest.mark.parametrize(
    ("device", "said"),
    [("mps", "0 MPS devices here"), ("xpu:1", "0 XPU devices here"), ("meta", "0 META devices")],
)
def test_refuses_any_device_that_is_not_there(device, said, monkeypatch):
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    for map_ in (None, device):
        with pytest.raises(UsageError, match=rf"`{device}`: {said}") as refused:
            resolve_device("auto" if map_ else device, map_)
        assert "cpu" in refused.value.hint


def test_takes_every_device_that_torch_finds(monkeypatch):
    for module, count in ((torch.mps, 1), (torch.xpu, 2)):
        monkeypatch.setattr(module, "is_available", lambda: True)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
    for device in ("mps", "mps:0", "xpu", "xpu:1"):
        assert resolve_device(device) == device
    for device, count in (("mps:1", "1 MPS"), ("xpu:2", "2 XPU")):
        with pytest.raises(UsageError, match=f"no device `{device}`: {count} devices here"):
            resolve_device(device)
    with pytest.raises(UsageError, match="flash_attention_2 needs a CUDA device, not xpu:1"):
        check_flash("xpu:1", monkeypatch)


def check_flash(device, monkeypatch):
    monkeypatch.setattr("kvtool.models.placement.find_spec", lambda name: object())
    check_attention("flash_attention_2", device)


def test_refuses_two_places():
    with pytest.raises(UsageError, match="--device and --device-map exclude each other"):
        resolve_device("cpu", "auto")


def test_refuses_flash_attention_without_its_package(monkeypatch):
    monkeypatch.setattr("kvtool.models.placement.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="flash_attention_2 needs the flash-attn package"):
        load(attn_implementation="flash_attention_2")


@pytest.mark.gpu
def test_on_a_gpu_the_dtype_is_the_checkpoints():
    loaded = load()
    assert loaded.model.device.type == "cuda"
    assert loaded.model.dtype == torch.float16
