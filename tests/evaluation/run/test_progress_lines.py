"""Lines that say how far a run is, and how much work it is."""

from kvtool.evaluation.measure import ProgressLines, work_in_words
from kvtool.evaluation.run.runner import Job, Measurement, Step
from kvtool.evaluation.samples.sample import Sample
from tests.evaluation.echo import Echo
from tests.evaluation.tasks.drawing import make
from tests.evaluation.tokenizers import WORDS


def job(cells, each, name="echo"):
    samples = [Sample(f"{c}/{i}", "", cell={"depth": c}) for c in range(cells) for i in range(each)]
    return Job(Echo(name=name), samples, [sample.id for sample in samples])


def said(jobs, variants, seconds=0.0):
    """The lines of a run whose measurements take so many seconds each."""
    part = [
        Measurement(j, s, v, 1)
        for j, each in enumerate(jobs)
        for s in range(len(each.samples))
        for v in range(variants)
    ]
    lines, now = [], [0.0]
    progress = ProgressLines(part, jobs, lines.append, lambda: now[0])
    for each in part:
        now[0] += seconds
        job = jobs[each.job]
        progress.step(Step("full", job.task.name, job.samples[each.sample].id, None))
    return lines


def test_a_line_comes_for_each_finished_cell():
    assert said([job(2, 3), job(1, 1, "last")], 2) == [
        "measured 6/14: echo depth=0",
        "measured 12/14: echo depth=1",
        "measured 14/14: last depth=0",
    ]


def test_a_cell_is_finished_when_the_last_of_its_measurements_is():
    """In a batch, answers end in an order of their own."""
    jobs, lines = [job(2, 2)], []
    progress = ProgressLines([Measurement(0, s, 0, 1) for s in range(4)], jobs, lines.append)
    for sample in ("0/0", "1/1", "1/0", "0/1"):
        progress.step(Step("full", "echo", sample, None))
    assert lines == ["measured 3/4: echo depth=1", "measured 4/4: echo depth=0"]


def test_many_cells_share_lines_and_the_last_one_comes():
    lines = said([job(101, 1)], 1)
    assert 15 <= len(lines) <= 21
    assert lines[-1] == "measured 101/101: echo depth=100"


def test_a_slow_run_says_something_every_minute():
    lines = said([job(1, 10)], 2, seconds=25)
    assert lines[:2] == [
        "measured 3/20: echo depth=0, not finished",
        "measured 6/20: echo depth=0, not finished",
    ]
    assert lines[-1] == "measured 20/20: echo depth=0"


def test_the_work_is_counted():
    for jobs, words in [
        ([job(11, 20)], "11 cells x 20 samples x 3 variants = 660 measurements"),
        ([job(33, 20)], "33 cells x 20 samples x 3 variants = 1,980 measurements"),
        ([job(1, 20)], "20 samples x 3 variants = 60 measurements"),
        ([job(2, 5), job(1, 2)], "12 samples x 3 variants = 36 measurements"),
    ]:
        assert work_in_words(jobs, 3) == words


def test_a_number_of_depths_and_a_place_are_told_apart():
    def samples(depths):
        drawn = list(make("niah", lengths=[100], depths=depths, samples=2).draw(WORDS))
        return work_in_words([Job(Echo(name="echo"), drawn, [])], 3)

    assert samples("50") == "50 cells x 2 samples x 3 variants = 300 measurements"
    assert samples("50%") == "2 samples x 3 variants = 6 measurements"
