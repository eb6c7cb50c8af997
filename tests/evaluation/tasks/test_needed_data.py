"""Which data a benchmark needs, what it says without them, and where the Hub has them."""

import re

import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.samples.data import Data
from tests.evaluation.tasks.counters import WORDS
from tests.evaluation.tasks.drawing import make

NEEDED = {
    "ruler/qa_2": "hotpot_dev_distractor_v1.json of HotpotQA",
    "aime25": "a file, or `aime25` for math-ai/aime25 on the hub",
    "math500": "a file, or `math500` for HuggingFaceH4/MATH-500 on the hub",
    "helmet/json_kv": "a file of HELMET, such as data/json_kv/",
    "nolima": "needlesets/needle_set.json of NoLiMa",
    "longmemeval": "longmemeval_s.json of LongMemEval",
    "longbench-v2": "a file, or `longbench-v2` for zai-org/LongBench-v2 on the hub",
    "mrcr": "a file, or `mrcr` for openai/mrcr on the hub",
    "scbench/qa_eng": "a file",
    "infinitebench/code_debug": "a file",
    "qa": "a file with context",
}


def test_without_data_a_task_says_what_it_needs():
    for name, file in NEEDED.items():
        task = make(name)
        assert task.missing.startswith(f"data: {file}")
        with pytest.raises(UsageError, match=re.escape(f"`{name}` needs data: {file}")):
            list(task.draw(WORDS))
        assert make(name, data="mine.jsonl").missing is None


def test_usual_data_are_a_dataset_on_the_hub():
    for name, place in {
        "gsm8k": Data(hub="openai/gsm8k", config="main"),
        "aime24": Data(hub="HuggingFaceH4/aime_2024", split="train"),
        "mrcr": Data(hub="openai/mrcr", split="train"),
        "longbench-v2": Data(hub="zai-org/LongBench-v2", split="train"),
    }.items():
        assert make(name, data=name).data == place
        assert make(name, data=name).missing is None


def test_suites_have_a_configuration_or_a_split_on_the_hub_for_each_task():
    task = make("scbench/qa_eng", data="scbench")
    assert task.on_hub(task.data) == Data(hub="microsoft/SCBench", config="scbench_qa_eng")
    assert "microsoft/SCBench on the hub" in make("scbench/qa_eng").missing
    task = make("infinitebench/code_debug", data="infinitebench")
    place = "xinrongzhang2022/InfiniteBench"
    assert task.on_hub(task.data) == Data(hub=place, split="code_debug")
    some = Data(hub=place, split="code_debug[:9]")
    assert task.on_hub(some) == some
    assert f"{place} on the hub" in make("infinitebench/code_debug").missing
