"""Models in GGUF files: what is loaded, which tokens they get, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.models import checkpoint
from kvtool.models import load as loading
from kvtool.models.checkpoint import RULES
from kvtool.models.folder import check_folder, find_source
from kvtool.models.gguf import read_header
from kvtool.models.load import load, load_config, load_tokenizer, read_config
from kvtool.models.notes import model_note
from tests.models import tiny_gguf

pytest.importorskip("gguf", reason="GGUF files need the package gguf")

IDS = torch.tensor([[1, 40, 77, 130, 41, 90, 3, 250]])
TEXTS = (
    "in the sea",
    "\n   0 and 127  7",
    "the 12 12 the12\t3\n\n   12",
    "x²½ \u0661\u0662 7the   the7",
    "a  \n 7 's 12's",
    "",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(file):
    return load(str(file))


def test_weights_and_rotations_are_those_that_were_written(loaded):
    expected = tiny_gguf.tiny_model()(IDS).logits
    torch.testing.assert_close(loaded.model(IDS).logits, expected, rtol=0, atol=1e-5)


def test_packed_weights_are_unpacked(tmp_path):
    model = load(str(tiny_gguf.write(tmp_path / "a.gguf", packed=True))).model
    assert all(type(each) is torch.nn.Parameter for each in model.parameters())
    logits, expected = model(IDS).logits, tiny_gguf.tiny_model()(IDS).logits
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    assert not torch.equal(logits, expected)


def test_configuration_is_that_of_an_ordinary_folder(file, loaded, tmp_path):
    plain = tiny_gguf.tiny_model().config
    assert loaded.config_hash == config_hash(load_config(str(file)))
    assert loaded.config_hash == config_hash(loaded.model.config)
    for name in ("rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(loaded.model.config, name) == pytest.approx(getattr(plain, name)), name
    loaded.model.save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).to_dict()["num_hidden_layers"] == tiny_gguf.LAYERS
    assert config_hash(read_config(str(tmp_path))) == loaded.config_hash
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, loaded.model(IDS).logits)


def test_dtype_to_unpack_into(file, tmp_path):
    packed = tiny_gguf.write(tmp_path / "a.gguf", packed=True)
    assert load_config(str(file)).dtype == torch.float32
    assert load_config(str(packed)).dtype == torch.bfloat16
    assert load(str(packed), dtype="float16").model.dtype == torch.float16
    weights, _ = checkpoint.load_gguf_weights(
        find_source(str(packed)).gguf, False, config=load_config(str(packed)), dtype="auto"
    )
    assert weights.dtype == torch.bfloat16


@pytest.mark.parametrize("text", TEXTS)
def test_digits_are_split_as_llama_cpp_splits_them(loaded, text):
    assert loaded.tokenizer(text)["input_ids"] == tiny_gguf.llama_cpp_tokens(text)


def test_texts_tell_the_rules_apart(tmp_path):
    tokenizer, _ = load_tokenizer(str(tiny_gguf.write(tmp_path / "a.gguf", pre="gpt-2")))
    gpt2 = [tiny_gguf.llama_cpp_tokens(text, digits_alone=False) for text in TEXTS]
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == gpt2
    ours = [tiny_gguf.llama_cpp_tokens(text) for text in TEXTS]
    assert sum(one != other for one, other in zip(gpt2, ours, strict=True)) >= 3


def test_tokenizer_knows_special_tokens_and_the_template(loaded):
    tokenizer = loaded.tokenizer
    assert tokenizer("<|im_start|>the")["input_ids"] == [1, *tiny_gguf.llama_cpp_tokens("the")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE


def test_every_way_to_name_a_file(file, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.GGUF").symlink_to(file)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("folder/a.GGUF", "folder", "folder:a.GGUF", "~/folder", str(folder)):
        source = find_source(name)
        assert (source.name, source.gguf.file) == (name, "a.GGUF")
        assert source.is_here
        check_folder(name)
        assert load_config(name)._name_or_path == name
    hub = find_source("me/tiny-GGUF:tiny.Q8_0.gguf")
    assert (hub.place, hub.gguf.file, hub.is_here) == ("me/tiny-GGUF", "tiny.Q8_0.gguf", False)
    assert "no such file here, asking the hub" in model_note("me/tiny-GGUF:tiny.Q8_0.gguf")
    assert "kvtool convert folder DIR" in model_note("folder")


def test_a_file_of_the_hub_is_loaded_at_its_commit(file, tmp_path, monkeypatch):
    asked = {}

    def download(repo, name, *, revision):
        asked.update(repo=repo, name=name, revision=revision)
        place = tmp_path / "snapshots" / "abc" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)
        return str(place)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(loading, "check_hub", lambda *where: None)
    loaded = load("me/tiny:t.gguf", revision="main")
    assert asked == {"repo": "me/tiny", "name": "t.gguf", "revision": "main"}
    assert (loaded.name, loaded.revision) == ("me/tiny:t.gguf", "main")
    assert loaded.config_hash == load(str(file)).config_hash


def test_a_folder_with_other_weights_is_not_a_gguf_file(file, tmp_path):
    (tmp_path / "a.gguf").symlink_to(file)
    (tmp_path / "model.safetensors").touch()
    assert find_source(str(tmp_path)).gguf is None
    assert find_source("").gguf is None


def test_several_files_are_refused_with_the_first_of_them(file, tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).symlink_to(file)
    with pytest.raises(UsageError, match=rf"holds 2 GGUF files; -m {tmp_path}/a\.gguf"):
        check_folder(str(tmp_path))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(file, package, monkeypatch):
    monkeypatch.setattr(
        "kvtool.extras.find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(UsageError, match=rf"needs {package}; pip install 'kvtool\[gguf\]'"):
        check_folder(str(file))


CUTS = {"in the head": 2000, "in a list": 300, "in the weights": -40_000}


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_that_is_cut_off_is_refused(file, tmp_path, cut):
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[: CUTS[cut]])
    with pytest.raises(UsageError, match="is not a whole GGUF file"):
        check_folder(str(short))


def test_a_file_that_lacks_its_last_bytes_is_refused(file, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(KvtoolError, match="cannot read the") as caught:
        load(str(short))
    assert "\n" not in str(caught.value)


WRONG = {
    "": "is no GGUF file",
    "GGUF": "is not a whole GGUF file",
    "GGUF\3\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\1\0\0\0\0\0\0\0": "is not a whole GGUF file",
    "GGUF\1\0\0\0" + 16 * "\0": "is a GGUF file of version 1",
    "GGUF\3\0\0\0" + 16 * "\0": "names no architecture",
    "<html>no such file</html>": "is no GGUF file",
}


@pytest.mark.parametrize("content", WRONG)
def test_what_is_no_gguf_file_is_refused(tmp_path, content):
    file = tmp_path / "a.gguf"
    file.write_bytes(content.encode("latin1"))
    with pytest.raises(UsageError, match=WRONG[content]):
        check_folder(str(file))


REFUSED = {
    "part": ({"changes": {"split.count": 3}}, "is one of 3 parts of a model"),
    "adapter": ({"changes": {"general.type": "adapter"}}, "holds no model, but: adapter"),
    "architecture": ({"architecture": "wondrous"}, "architecture of model .* is not supported"),
    "no rule": ({"pre": None}, "does not say how text is split into tokens"),
    "unknown rule": ({"pre": "wondrous"}, "splits text by the rule `wondrous`"),
    "factors of rotations": ({"more": ["rope_freqs.weight"]}, "scales its rotations"),
    "scaled rotations": ({"changes": {"llama.rope.scaling.type": "yarn"}}, "scales its rotations"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_would_give_another_model_is_refused(tmp_path, name):
    settings, message = REFUSED[name]
    file = tiny_gguf.write(tmp_path / "a.gguf", **settings)
    with pytest.raises(KvtoolError, match=message):
        load_tokenizer(str(file))


def test_rules_of_transformers_need_no_repair():
    from kvtool.transformers_versions import gguf_splits

    assert not {*RULES} & {*gguf_splits()}
    assert {"llama-bpe", "qwen2", "tekken"} <= {*gguf_splits()}


def test_head_agrees_with_the_library(file):
    import gguf

    header, reader = read_header(file, "it"), gguf.GGUFReader(file)
    assert header.tensors == {each.name: int(each.tensor_type) for each in reader.tensors}
    assert header.settings["tokenizer.ggml.tokens"] == len(tiny_gguf.TOKENS)
    fields = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
    assert {*header.settings} == {*fields}
    for name in ("general.architecture", "llama.rope.freq_base", "llama.block_count"):
        assert header.settings[name] == fields[name].contents()
