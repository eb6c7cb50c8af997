"""Every metric that a task gives has words and a sentence."""

import ast
import inspect

from kvtool.evaluation.tasks import scbench
from kvtool.evaluation.tasks.longbench import LongBench
from kvtool.evaluation.tasks.table import TASKS, task_class
from kvtool.report.metrics import METRICS, headline, meaning
from tests.report.examples import result, variants

VARIANT = variants()[1]


def in_source(module) -> set[str]:
    """The names of metrics in the functions of a module that score, from their dictionaries."""
    wanted = {"score", "summarise", "overlap", "corpus_overlap"}
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            for part in ast.walk(node):
                if isinstance(part, ast.Dict):
                    found |= {key.value for key in part.keys if isinstance(key, ast.Constant)}
                if isinstance(part, ast.comprehension) and isinstance(part.iter, ast.Tuple):
                    found |= {each.value for each in part.iter.elts}
                if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
                    found |= {part.slice.value} if "metrics" in ast.unparse(part.value) else set()
    return found - {"nll by position", "error by layer"}  # curves


def test_every_metric_of_every_task_is_told_in_words():
    classes = {name: task_class(name) for name in TASKS}
    names = {kind.metric for kind in classes.values()}
    for module in {inspect.getmodule(kind) for kind in classes.values()}:
        names |= in_source(module)
    mixed = [kinds for kinds in scbench.FORMS.values() if len(kinds) > 1]
    names |= {kind for kinds in mixed for kind in kinds}
    names |= {
        LongBench(name=name, data={"path": "x"}).benchmark.metric
        for name, kind in classes.items()
        if kind is LongBench
    }
    assert names == set(METRICS)
    assert {"em", "kl", "qa_f1", "repoqa", "first_divergence", "ttft_s", "nll"} <= names


def test_headlines_say_units_and_where_better_is():
    assert headline(result(VARIANT, "a", 0.5, 0.5)) == "exact match ↑"
    percent = {"metric": "accuracy", "best": 100.0}
    assert headline(result(VARIANT, "a", 0.5, 0.5, **percent)) == "accuracy (%) ↑"
    bleu = {"metric": "bleu", "best": 100.0}
    assert headline(result(VARIANT, "a", 0.5, 0.5, **bleu)) == "BLEU (0 to 100) ↑"
    nmse = {"metric": "nmse", "best": 0.0, "lower_is_better": True}
    assert headline(result(VARIANT, "a", 0.5, 0.5, **nmse)) == "normalised squared error ↓"
    speed = {"metric": "decode_tokens_per_s", "best": None}
    assert headline(result(VARIANT, "a", 0.5, 0.5, **speed)) == "decode speed (tokens/s) ↑"
    other = {"metric": "acc_norm,none", "best": 1.0}
    assert headline(result(VARIANT, "a", 0.5, 0.5, **other)) == "acc norm,none ↑"
    assert "harness" in meaning("acc_norm,none")
