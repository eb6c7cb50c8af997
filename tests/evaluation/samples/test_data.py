"""Data as people name them, files as they come, and one line for each that cannot be read."""

import hashlib
import json

import pytest
from pydantic import TypeAdapter, ValidationError

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.samples.data import PRESETS, Data, documents, read_json, read_rows

ROWS = [
    {"context": "a b", "answers": ["x", "y"], "length": 2},
    {"context": "line\u2028separator", "answers": 7, "length": 3},  # mixed types are legitimate
]


def data(value):
    return TypeAdapter(Data | None).validate_python(value)


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "qasper.jsonl").write_text("\ufeff" + "\n".join(lines) + "\n\n", "utf-8")
    return tmp_path


# ---- names


def test_a_string_is_a_path_or_a_name_on_the_hub():
    for text, place in [
        ("./qasper", "path"),
        ("/data/qasper", "path"),
        ("~/longbench", "path"),
        ("qasper.jsonl", "path"),
        ("data/qasper.jsonl", "path"),
        ("data/longbench/v1", "path"),
        ("org/name", "hub"),
        ("org/openwebtext-1.0", "hub"),
        ("squad", "hub"),
    ]:
        assert data(text) == Data(**{place: text})


def test_what_exists_is_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "org" / "name").mkdir(parents=True)
    assert data("org/name") == Data(path="org/name")
    assert data(folder) == Data(path=str(folder))


def test_refuses_no_place_and_two():
    for value, message in [
        ({"path": "a", "hub": "b"}, "one of path and hub, got both"),
        ({"split": "test"}, "one of path and hub, got neither"),
        ("", "one of path and hub, got neither"),
        ({"path": "a", "colour": "red"}, "colour"),
    ]:
        with pytest.raises(ValidationError, match=message):
            data(value)


def test_data_as_json_are_read_back():
    given = data("xsum")
    assert given.revision == "refs/convert/parquet"
    assert data(given.model_dump(mode="json")) == given
    assert (str(data("cnn_dailymail")), str(data("a.txt"))) == (
        "abisee/cnn_dailymail/3.0.0",
        "a.txt",
    )


# ---- files


def test_json_lines_are_read_as_they_are(folder):
    read = read_rows(data(folder / "qasper.jsonl"), ["context", "answers"], task="t")
    assert read.rows == ROWS
    assert read.columns == ["context", "answers", "length"]
    expected = hashlib.sha256((folder / "qasper.jsonl").read_bytes()).hexdigest()
    assert read.fingerprint == expected


def test_a_json_file_is_a_list_or_lines(tmp_path):
    for layout in ["list", "lines"]:
        lines = "\n".join(map(json.dumps, ROWS))
        text = json.dumps(ROWS, indent=1) if layout == "list" else lines
        (tmp_path / "a.json").write_text(text)
        assert read_rows(data(tmp_path / "a.json"), task="t").rows == ROWS


def test_columns_are_read_as_rows(tmp_path):
    for suffix in ["parquet", "arrow"]:
        import pyarrow
        import pyarrow.parquet

        rows = [{"text": "a", "answers": ["x", "y"]}, {"text": "b", "answers": []}]
        table = pyarrow.Table.from_pylist(rows)
        path = tmp_path / f"a.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write(table)
        assert read_rows(data(path), task="t").rows == rows


def test_csv_keeps_texts_as_they_are(tmp_path):
    long = "x" * 200_000  # longer than the csv module takes by default
    (tmp_path / "a.csv").write_text(f'id,text\n007,"two\nlines, ""quoted"""\nNA,{long}\n')
    expected = [{"id": "007", "text": 'two\nlines, "quoted"'}, {"id": "NA", "text": long}]
    assert read_rows(data(tmp_path / "a.csv"), task="t").rows == expected


def test_a_folder_holds_the_file_of_the_task(folder):
    assert read_rows(data(folder), task="longbench/qasper").rows == ROWS
    (folder / "qasper_e.json").write_text("[{}]")
    assert read_rows(data(folder), task="longbench_e/qasper", stem="qasper_e").rows == [{}]


def test_one_json_value_is_read_whole(tmp_path):
    value = {"version": 2, "data": [{"paragraphs": []}]}
    (tmp_path / "dev.json").write_text(json.dumps(value, indent=2))
    read, fingerprint = read_json(data(tmp_path / "dev.json"), task="ruler/qa_1")
    assert read == value
    assert fingerprint == hashlib.sha256((tmp_path / "dev.json").read_bytes()).hexdigest()


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path):
    for name, content, message in [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "`.*a.jsonl`: line 2: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', "entry 2 is no JSON object"),
        ("a.jsonl", b'{"a": 1}\n"\xff"\n', "line 2: 'utf-8' codec can't decode byte 0xff"),
        ("a.json", b'[{"a": 1},\n {"a" 1}]', "Expecting ':' delimiter: line 2"),
        ("a.json", b'[{"a": 1}, 2]', "entry 2 is no JSON object"),
        ("a.json", b'{"a": 1}\n{"a": }\n', "line 2: Expecting value"),
        ("a.csv", b"a,b\n1,2\n1\n", "row 2 has another number of fields"),
        ("a.csv", b'a,b\n1,"2\n', "unexpected end of data"),
        ("a.txt", b"one\ntwo \xe9", "can't decode byte 0xe9"),
        ("a.parquet", b"text", "cannot read `.*a.parquet`"),
        ("a.arrow", b"text", "cannot read `.*a.arrow`"),
        ("a.jsonl", b"\n", "t: `a.jsonl` is empty"),
        ("a.txt", b" \n", "t: `a.txt` is empty"),
        ("a.tsv", b"a\tb", r"ends in no known format"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(KvtoolError, match=message) as caught:
            read_rows(data(tmp_path / name), task="t")
        assert "\n" not in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(folder):
    with pytest.raises(UsageError, match=r"longbench/qasper: no file `.*qsper.jsonl`") as caught:
        read_rows(data(folder / "qsper.jsonl"), task="longbench/qasper")
    assert caught.value.hint == "did you mean `qasper.jsonl`?"
    with pytest.raises(UsageError, match=r"folder `.*nowhere` does not exist"):
        read_rows(data(folder / "nowhere" / "a.jsonl"), task="t")
    with pytest.raises(UsageError, match="it is a folder"):
        read_json(data(folder), task="t")


def test_a_folder_without_the_task_says_what_it_has(folder):
    with pytest.raises(UsageError, match=r"has no `trec.jsonl` or other") as caught:
        read_rows(data(folder), task="longbench/trec")
    assert caught.value.hint == "it has: qasper.jsonl"


def test_a_missing_column_is_named_with_those_there_are(folder):
    expected = "`qasper.jsonl` row 1 lacks column `input`; there are: context, answers, length"
    with pytest.raises(KvtoolError) as caught:
        read_rows(data(folder), ["context", "input"], task="longbench/qasper")
    assert str(caught.value) == expected


def test_a_row_that_lacks_a_column_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n{"a": 1}\n')
    with pytest.raises(KvtoolError, match=r"`a.jsonl` row 2 lacks column `b`"):
        read_rows(data(tmp_path / "a.jsonl"), ["a", "b"], task="t")


# ---- documents


def test_the_only_text_column_is_taken(tmp_path):
    for column in ["text", "article", "document", "content", "chapter"]:
        rows = [{column: "one", "summary": "1"}, {column: " \n"}, {column: None}, {column: "two"}]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        texts, fingerprint = documents(data(tmp_path / "a.jsonl"), task="ppl")
        assert texts == [("0", "one"), ("3", "two")]
        assert fingerprint == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()


def test_a_named_column_goes_before_any_other(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "chapter": "no", "body": "yes"}\n')
    chosen = Data(path=str(tmp_path / "a.jsonl"), field="body")
    assert documents(chosen, task="ppl")[0] == [("0", "yes")]
    with pytest.raises(UsageError, match=r"the text column of `a.jsonl` may be any of text, chap"):
        documents(data(tmp_path / "a.jsonl"), task="ppl")
    wrong = Data(path=str(tmp_path / "a.jsonl"), field="boddy")
    with pytest.raises(UsageError, match="is not `boddy`"):
        documents(wrong, task="ppl")


def test_a_text_file_is_one_document_and_a_folder_many(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\nparagraph")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("left alone")
    assert documents(data(tmp_path / "b.txt"), task="ppl")[0] == [("0", "second\n\nparagraph")]
    texts, before = documents(data(tmp_path), task="ppl")
    assert texts == [("a.txt", "first"), ("b.txt", "second\n\nparagraph")]
    (tmp_path / "a.txt").write_text("First")
    assert documents(data(tmp_path), task="ppl")[1] != before


def test_texts_that_are_none_are_refused(tmp_path):
    for rows, message in [
        ([{"title": "x"}], "the text column of `a.jsonl` is not known"),
        ([{"text": ["x"]}], "column `text` of `a.jsonl` holds something else than text"),
        ([{"text": ""}, {"text": None}], "column `text` of `a.jsonl` has no text"),
    ]:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(KvtoolError, match=message):
            documents(data(tmp_path / "a.jsonl"), task="ppl")


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no text files \(.txt\)"):
        documents(data(tmp_path), task="ppl")


# ---- the hub


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_a_local_copy_of_a_dataset_is_read_as_the_hub_is(tmp_path, capsys, own_cache):
    (tmp_path / "test.jsonl").write_text('{"chapter": "one"}\n{"chapter": "two"}\n')
    (tmp_path / "train.jsonl").write_text('{"chapter": "three"}\n')
    texts, fingerprint = documents(Data(hub=str(tmp_path)), task="ppl")
    assert texts == [("0", "one"), ("1", "two")]
    assert fingerprint.startswith(f"{tmp_path}@")
    one = Data(hub=str(tmp_path), split="train[:1]")
    assert read_rows(one, ["chapter"], task="ppl").rows == [{"chapter": "three"}]
    assert capsys.readouterr().out == ""


def test_an_unknown_split_is_told_in_one_line(tmp_path, own_cache):
    (tmp_path / "test.jsonl").write_text('{"chapter": "one"}\n')
    with pytest.raises(KvtoolError, match='Unknown split "dev"') as caught:
        read_rows(Data(hub=str(tmp_path), split="dev"), task="ppl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        (
            "longbenhc",
            ConnectionError("Couldn't reach\nthe Hub"),
            "did you mean `longbench`, or download a file and pass `--data ppl=FILE`",
        ),
        (
            "org/name",
            RuntimeError("Dataset scripts are no longer supported, but found name.py"),
            "set `revision: refs/convert/parquet` of the data, where the hub keeps a copy",
        ),
    ],
)
def test_a_hub_that_fails_is_told_in_one_line(name, error, hint, monkeypatch, capsys):
    import datasets

    def fail(*args, **kwargs):
        print("chatter")  # noqa: T201 - what must not reach stdout
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(KvtoolError, match=f"ppl: cannot load `{name}` from the hub: ") as caught:
        documents(data(name), task="ppl")
    assert "\n" not in str(caught.value)
    assert caught.value.hint == hint
    assert capsys.readouterr() == ("", "chatter\n")


def test_a_preset_knows_its_text_column(tmp_path, monkeypatch, own_cache):
    (tmp_path / "test.jsonl").write_text('{"content": "summary of", "chapter": "one"}\n')
    monkeypatch.setitem(PRESETS, "booksum", {"hub": str(tmp_path), "field": "chapter"})
    assert documents(Data(hub=str(tmp_path)), task="ppl")[0] == [("0", "one")]
