"""Every task by name, without importing any before it is asked for."""

from __future__ import annotations

import fnmatch
from importlib import import_module

from kvtool.errors import UsageError, did_you_mean
from kvtool.evaluation.tasks.task import Task
from kvtool.policies.outside import is_outside, own_class

_NEEDLES = [
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
    *("niah_multikey_3", "niah_multivalue", "niah_multiquery"),
]
_LONGBENCH_E = [
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
]
_LONGBENCH = [*_LONGBENCH_E, "narrativeqa", "musique", "qmsum"]
_SCBENCH_FILES = [
    *("repoqa", "qa_eng", "qa_chn", "choice_eng", "many_shot", "summary", "summary_with_needles"),
    "repoqa_and_kv",
]
_INFINITEBENCH_FILES = [
    *("longbook_qa_eng", "longbook_qa_chn", "longbook_sum_eng", "longbook_choice_eng"),
    *("longdialogue_qa_eng", "code_debug"),
]
_HELMET_RECALL = ["json_kv", "ruler_niah_mk_2", "ruler_niah_mk_3", "ruler_niah_mv"]

TASKS: dict[str, str] = {
    "niah": "niah:Needle",
    "niah/passkey": "niah:PassKey",
    "niah/city": "niah:City",
    **{f"ruler/{name}": "ruler:RulerNeedles" for name in _NEEDLES},
    "ruler/vt": "ruler:VariableTracking",
    "ruler/cwe": "ruler:CommonWords",
    "ruler/fwe": "ruler:FrequentWords",
    "ruler/qa_1": "ruler_questions:RulerQuestions",
    "ruler/qa_2": "ruler_questions:RulerQuestions",
    "scbench/kv": "scbench:KeyValue",
    "scbench/prefix_suffix": "scbench:PrefixSuffix",
    "scbench/vt": "scbench:Variables",
    "scbench/mf": "scbench:MathFind",
    **{f"scbench/{name}": "scbench:SharedContextFile" for name in _SCBENCH_FILES},
    "infinitebench/passkey": "infinitebench:PassKeyRetrieval",
    "infinitebench/number_string": "infinitebench:NumberRetrieval",
    "infinitebench/kv_retrieval": "infinitebench:KeyValueRetrieval",
    "infinitebench/math_find": "infinitebench:MathFindNumber",
    "infinitebench/math_calc": "infinitebench:MathCalculation",
    "infinitebench/code_run": "infinitebench:CodeRun",
    **{f"infinitebench/{name}": "infinitebench:BookFile" for name in _INFINITEBENCH_FILES},
    **{f"longbench/{name}": "longbench:LongBench" for name in sorted(_LONGBENCH)},
    **{f"longbench_e/{name}": "longbench:LongBench" for name in sorted(_LONGBENCH_E)},
    **{f"helmet/{name}": "helmet:Helmet" for name in _HELMET_RECALL},
    "qa": "qa:Questions",
    "longmemeval": "longmemeval:LongMemEval",
    "nolima": "nolima:NoLiMa",
    "mrcr": "mrcr:Mrcr",
    "longbench-v2": "longbench_v2:LongBenchV2",
    "trace": "trace:Trace",
    "chain": "chain:Chain",
    **dict.fromkeys(("gsm8k", "math500", "aime24", "aime25"), "reasoning:Reasoning"),
    "ppl": "perplexity:Perplexity",
    "fidelity": "fidelity:FidelityTask",
    "reconstruct": "fidelity:Reconstruct",
    "output-error": "fidelity:OutputError",
    "speed": "speed:Speed",
}
ALIASES = {
    "infinitebench/number": "infinitebench/number_string",
    "infinitebench/kv": "infinitebench/kv_retrieval",
    "niah/number": "niah",
}
OPEN = {"lm-eval": "lm_eval:LmEval"}  # any name of the other harness, behind this prefix


def expand(pattern: str) -> list[str]:
    """Return the tasks that a name, a suite (`ruler`) or a glob (`ruler/niah_*`) stands for.

    Raises:
        UsageError: none.
    """
    name = pattern.strip()
    name = ALIASES.get(name, name)
    if is_outside(name) or name in TASKS or (name.partition("/")[0] in OPEN and "/" in name):
        return [name]
    if name.strip("/") in OPEN:
        raise UsageError(f"`{name}` is not one task", hint=f"name one: {name.strip('/')}/gsm8k")
    found = [task for task in TASKS if task.startswith(f"{name}/") or fnmatch.fnmatch(task, name)]
    if not found:
        suites = {task.partition("/")[0] for task in TASKS} | set(OPEN)
        raise UsageError(
            f"no task `{name}`",
            hint=did_you_mean(name, [*TASKS, *ALIASES, *suites])
            or f"suites: {', '.join(sorted(suites))}",
        )
    return found


def task_class(name: str, *, imports: bool = False) -> type[Task]:
    """Return the class of a task, importing its file only now.

    Args:
        imports: whether a module of the user's, `my_module:MyTask`, is imported; else it must be
            imported already.

    Raises:
        UsageError: there is no such task.
    """
    if is_outside(name):
        return own_class(name, Task, what="task", option="--tasks", imports=imports)
    place = TASKS.get(name) or OPEN.get(name.partition("/")[0])
    if place is None:
        raise UsageError(f"no task `{name}`", hint=did_you_mean(name, TASKS))
    module, _, symbol = place.partition(":")
    return getattr(import_module(f"kvtool.evaluation.tasks.{module}"), symbol)
