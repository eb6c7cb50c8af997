"""Prompts that are lined up for their rows."""

from kvtool.calls.answering import line_up
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.prompts import PromptEntry
from kvtool.models.load import load
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget


def test_a_text_beyond_the_models_positions_is_told_of_once(listening):
    request = Request(None, "a list", parse_policy("h2o"), Budget.parse(24), "full")
    prompts = [PromptEntry(prompt="The old lamp", max_new_tokens=new) for new in (5, 9000, 9000)]
    lined, _ = line_up(GenerationSettings(), request, load(), prompts, {}, listening, None)
    assert [each.max_new_tokens for each in lined] == [5, 9000, 9000]
    sizes = [each.sequence_bytes for each in lined]
    assert 0 < sizes[0] < sizes[1] == sizes[2]  # of 11 tokens, and of the whole budget
    assert len(listening.told) == 1
    assert "8192" in listening.told[0]
