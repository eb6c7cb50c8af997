"""A setting is declared once: its flag, its keyword, its key in a recipe and in files follow."""

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import kvtool
from kvtool.calls.from_python import keywords_of
from kvtool.calls.output_settings import OutputSettings
from kvtool.cli.options import OneOfEach, command
from kvtool.documents.document import Section
from kvtool.documents.overrides import apply_sets
from kvtool.documents.recipe import Evaluation, Recipe
from kvtool.documents.resolve import flags_of
from kvtool.documents.results import ProtocolEntry
from kvtool.documents.settings import Asking, Protocol, as_entry, as_flags, flag
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError

PACKAGE = Path(kvtool.__file__).parent


@dataclass(frozen=True, kw_only=True)
class More(Asking):
    """The protocol with one declaration more, which is all that a new flag takes."""

    top_k: int | None = flag("--top-k=N", "Draw from N tokens.", min=1, later=True)


@dataclass(frozen=True, kw_only=True)
class MoreProtocol(Protocol, More):
    pass


@dataclass(frozen=True, kw_only=True)
class MoreSettings(as_flags(More, under="eval"), OutputSettings):
    pass


def parse(*arguments):
    """Settings that a command with the new flag is run with."""
    found = []

    def run(options: MoreSettings, terminal) -> None:
        found.append(options)

    run.__annotations__ = {"options": MoreSettings}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("run", cls=OneOfEach)(command(run))
    typer.main.get_command(app)(list(arguments), standalone_mode=False)
    return found[0] if found else None


def test_a_protocol_flag_that_is_declared_is_an_option_and_a_keyword(capsys):
    assert parse("--top-k", "3").top_k == 3
    assert parse().top_k is None
    assert "top_k" in keywords_of(MoreSettings)
    parse("--help")
    shown = capsys.readouterr().out
    assert re.search(r"--top-k N .*Draw from N tokens\.", shown)
    with pytest.raises(typer.TyperException):
        parse("--top-k", "0")


def test_a_protocol_flag_that_is_declared_is_laid_over_a_recipe():
    class MoreEvaluation(Evaluation, More):
        pass

    class MoreRecipe(Recipe):
        eval: MoreEvaluation

    [(origin, values)] = flags_of(parse("--top-k", "3")).values
    assert (origin, values) == ("--top-k 3", {"eval": {"top_k": 3}})
    recipe = Source.parse("kind: recipe\nschema_version: 1\neval: {top_k: 3}\n", "r.yaml")
    assert recipe.validate(MoreRecipe).eval.top_k == 3
    changed = apply_sets(recipe, ["eval.top_k=5"])
    assert changed.validate(MoreRecipe).eval.top_k == 5
    assert "top_k: 5" in changed.validate(MoreRecipe).to_yaml()
    with pytest.raises(DocumentError, match="top_k"):
        recipe.validate(Recipe)
    with pytest.raises(DocumentError, match="top_k"):
        apply_sets(recipe, ["eval.top_k=many"]).validate(MoreRecipe)


def test_a_protocol_flag_that_is_declared_is_in_the_files_of_a_run():
    class MoreEntry(Section, as_entry(MoreProtocol)):
        pass

    assert MoreProtocol().identity() == Protocol().identity()
    assert MoreProtocol(top_k=3).identity()["top_k"] == 3
    earlier = ProtocolEntry(**vars(Protocol())).model_dump()
    assert MoreEntry(**earlier).top_k is None
    dumped = MoreEntry(**vars(MoreProtocol(top_k=3))).model_dump()
    assert list(dumped) == [*earlier, "top_k"]
    assert dumped["top_k"] == 3


def test_a_file_of_a_run_must_hold_the_protocol_of_the_first_version():
    whole = ProtocolEntry(**vars(Protocol())).model_dump()
    for name in whole:
        less = {key: value for key, value in whole.items() if key != name}
        if name in ("keep_question", "shared_prefill", "answers", "batch"):
            assert ProtocolEntry(**less).model_dump() == whole
        else:
            with pytest.raises(ValueError, match="Field required"):
                ProtocolEntry(**less)


def test_few_files_name_a_setting():
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py*") if path.suffix != ".pyc"}
    for name in ("keep_question", "chat_template", "trust_remote_code"):
        naming = [path for path, text in texts.items() if re.search(rf"\b{name}\b", text)]
        assert 2 <= len(naming) <= 5, naming


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
