"""What every task that draws samples to a length must hold, and oracles that read their text."""

from kvtool.evaluation.samples.fit import needed_tokens
from kvtool.evaluation.tasks.table import task_class


def make(name, **settings):
    return task_class(name)(name=name, **settings)


def draw(name, tokens, **settings):
    return list(make(name, **settings).draw(tokens))


def score(task, sample, prediction):
    """Score one answer to the only question of a sample."""
    (turn,) = sample.turns
    answered = {"prediction": prediction, "references": list(turn.references)}
    return task.score({"turns": [answered], "facts": sample.facts})


def check_fill(name, tokens, length, spare, **settings):
    """A sample is never longer than its length, and at most `spare` tokens shorter."""
    for sample in draw(name, tokens, lengths=length, samples=3, **settings):
        assert length - spare <= needed_tokens(sample, tokens) <= length
        assert sample.cell["length"] == length


def check_drawing(name, tokens, **settings):
    """The same settings give the same samples, whatever else is drawn; another seed others."""
    few = draw(name, tokens, lengths=[1024], samples=2, **settings)
    many = draw(name, tokens, lengths=[700, 1024], samples=4, **settings)
    by_id = {sample.id: sample for sample in many}
    assert len(by_id) == len(many)
    assert all(by_id[sample.id] == sample for sample in few)
    assert len({sample.context for sample in many}) == len(many)
    other = draw(name, tokens, lengths=[1024], samples=2, seed=1, **settings)
    assert all(a.context != b.context for a, b in zip(few, other, strict=True))
