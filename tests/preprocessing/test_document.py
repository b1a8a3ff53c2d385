import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing import document
from preprocessing.document import RULES, Record, read_document


def read(data, format="jsonl", line=3, key="text"):
    document, problems = read_document(Record(data, "a.jsonl", line, format), key)
    return document and document.text, [problem.kind for problem in problems]


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1))
def test_good_text_comes_through_unchanged(text):
    for ascii_only in (True, False):
        line = json.dumps({"text": text, "meta": 1}, ensure_ascii=ascii_only).encode()
        assert read(line + b"\r\n") == (text, [])
    assert read(text.encode(), "text", line=7) == (text, [])


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "a"', "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b'{"text": "a"}{"text": "b"}', "invalid_json"),
        (b'{"text": ' + b"9" * 5000 + b"}", "invalid_json"),  # a ValueError of another kind
        (b"[" * 100_000, "invalid_json"),  # a RecursionError
        (b'["text"]', "not_an_object"),
        (b'{"body": "a"}', "missing_text"),
        (b'{"text": null}', "text_not_string"),
        (b'{"text": ["a"]}', "text_not_string"),
        (b'{"text": ""}', "empty"),
        (b"\n", "empty"),
        (b"  \r\n", "empty"),
        (b"", "empty"),
    ],
)
def test_what_is_dropped(line, kind):
    assert read(line) == (None, [kind])
    assert RULES[kind] == "dropped"


def test_what_is_repaired():
    assert read(b'{"text": "a\xff\xfeb"}') == ("a\ufffd\ufffdb", ["invalid_utf8"])
    assert read(b'{"text": "a\\ud83d b"}') == ("a\ufffd b", ["lone_surrogate"])
    assert read(b'{"text": "\\ud83d\\ude00"}') == ("\U0001f600", [])  # a whole pair
    assert read(b"\xc3", "text") == ("\ufffd", ["invalid_utf8"])
    assert read(b"\xff{") == (None, ["invalid_utf8", "invalid_json"])


def test_byte_order_mark_and_blank_text():
    assert read(b'\xef\xbb\xbf{"text": "a"}', line=1) == ("a", [])
    assert read(b"\xef\xbb\xbfa", "text", line=0) == ("a", [])
    assert read(b" \n", "text", line=0) == (" \n", [])  # white space is text


def test_problems_say_where_and_what():
    _, problems = read_document(Record(b'{"body": 1}', "x.jsonl", 17, "jsonl"), "text")
    assert str(problems[0]) == "x.jsonl:17: missing_text dropped (no key 'text'; it has 'body')"
    _, problems = read_document(Record(b"a\xff", "x.txt", 0, "text"), "text")
    assert str(problems[0]).startswith("x.txt: invalid_utf8 repaired (byte 1 is 0xff")


def test_the_rules_are_documented_one_a_line():
    lines = [line.split() for line in (document.__doc__ or "").splitlines()]
    documented = {words[0]: words[1] for words in lines if words and words[0] in RULES}
    assert documented == RULES
