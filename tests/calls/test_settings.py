"""Settings: in the files of a run, and as keywords of the calls that editors are shown."""

import ast
import inspect
from pathlib import Path

import pytest

import kvtool
from kvtool.documents.results import ProtocolEntry
from kvtool.documents.settings import Protocol

PACKAGE = Path(kvtool.__file__).parent


def test_a_file_of_a_run_must_hold_the_protocol_of_the_first_version():
    whole = ProtocolEntry(**vars(Protocol())).model_dump()
    for name in whole:
        less = {key: value for key, value in whole.items() if key != name}
        if name in ("keep_question", "shared_prefill", "answers"):
            assert ProtocolEntry(**less).model_dump() == whole
        else:
            with pytest.raises(ValueError, match="Field required"):
                ProtocolEntry(**less)


def stub(name):
    """Parameters of a call as editors read them: whether by keyword only, and the default."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    [call] = [each for each in tree.body if getattr(each, "name", "") == name]
    pairs = [
        *zip(call.args.args, call.args.defaults, strict=True),
        *zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True),
    ]
    keywords = {each.arg for each in call.args.kwonlyargs}
    return {each.arg: (each.arg in keywords, ast.literal_eval(value)) for each, value in pairs}


def test_editors_are_shown_the_keywords_that_a_call_takes():
    for name in ("generate", "compress", "plan", "profile", "evaluate"):
        own = inspect.signature(getattr(kvtool, name)).parameters.values()
        found = {each.name: (each.kind is each.KEYWORD_ONLY, each.default) for each in own}
        shown = stub(name)
        assert found.keys() == shown.keys()
        for key, (keyword, default) in shown.items():
            assert found[key][0] is keyword, (name, key)
            assert default is ... or found[key][1] == default, (name, key)


def test_the_stub_offers_what_the_package_offers():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    shown = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    for each in tree.body:
        if isinstance(each, ast.ImportFrom):
            shown |= {alias.asname for alias in each.names if alias.asname}
    assert shown == set(kvtool.__all__)
