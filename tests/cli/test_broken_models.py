"""Every command on a checkpoint whose numbers are broken: one line with the first module."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.documents.results import ResultsDocument
from kvtool.models import reference

PLACE = "model.layers.1.self_attn.v_proj"
TOLD = f"the weights of `{PLACE}` hold NaN or infinite numbers"


@pytest.fixture
def broken(tmp_path):
    """A folder with the bundled model, one number of which is NaN."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in reference.path().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[f"{PLACE}.weight"][5, 7] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return "broken"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-p", "h2o+caote", "-b", "64"),
        ("generate", "-p", "d2o", "-b", "64", "--temperature", "1"),
        ("compress", "-p", "snapkv", "-b", "64", "--prompt", "The old lamp", "--save", "a.st"),
        ("profile", "--tokens", "64", "--samples", "1", "--metrics", "output_error,key_basis"),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_one_line_and_nothing_written(kvtool, broken, tmp_path, arguments):
    done = kvtool(*arguments, "-q", "-m", broken)
    assert (done.code, done.out.strip()) == (1, "")
    error, hint = done.err.splitlines()
    assert error == f"error: `{broken}` is broken: {TOLD}"
    assert hint.startswith("hint: the checkpoint is damaged")
    assert [path.name for path in tmp_path.iterdir()] == [broken]


TASKS = "niah,ppl,fidelity,output-error,speed,reconstruct,ruler/vt"


@pytest.mark.exhaustive
def test_every_task_records_its_samples_as_failed(kvtool, broken):
    done = kvtool(
        *("eval", "-q", "-m", broken, "-t", TASKS, "--lengths", "192", "--samples", "1"),
        *("--depths", "1", "-p", "h2o", "-b", "64", "-o", "run", "--no-plots"),
    )
    assert done.code == 4, done.err
    results = ResultsDocument(**json.loads(done.out))
    assert results.complete
    assert len({result.task for result in results.results}) == len(TASKS.split(","))
    for result in results.results:
        assert (result.n, result.failed > 0) == (0, True)
    with open("run/samples/full/niah.jsonl", encoding="utf-8") as file:
        assert TOLD in json.loads(file.readline())["error"]
