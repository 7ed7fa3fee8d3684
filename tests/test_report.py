"""What documents say was measured is what the report draws from the records, and says what they say."""

import re
from pathlib import Path

import pytest

from benchmarks.measure import RESULTS
from benchmarks.report import HOLDERS, longest_cases, read_records, tables, with_table

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_tables_in_the_docs_are_those_of_the_records():
    assert (DOCS / "measured.md").read_text() == tables(read_records(RESULTS))


@pytest.mark.parametrize("path", HOLDERS, ids=lambda path: path.name)
def test_the_short_table_in_other_documents_is_that_of_the_records(path):
    text = path.read_text()
    assert with_table(text, longest_cases(read_records(RESULTS))) == text


def test_the_short_table_has_the_longest_case_of_each_thing_with_a_floor():
    rows = [
        {
            "what": "x",
            "case": "a",
            "time_us": 30.0,
            "floor_us": 20.0,
            "baselines": {"sort": 5.0, "other": 6.0},
        },
        {"what": "x", "case": "b", "time_us": 10.0, "floor_us": 20.0},
        {"what": "y", "case": "c", "time_us": 1.0, "floor_us": 2.0},
        {"what": "z", "case": "d", "wire_bytes": {}},
    ]
    lines = longest_cases({"n.d": {"rows": rows}}).splitlines()[2:]
    assert lines == ["| n.d: x | a | 30 | 20 | 1.5 | sort 5, other 6 |", "| n.d: y | c | 1 | 2 | 0.5 |  |"]
    with pytest.raises(ValueError, match="no lines"):
        with_table("nothing", "")


def test_every_case_has_a_line_with_its_own_figures():
    row = {
        "case": "a",
        "time_us": 30.0,
        "floor_us": 20.0,
        "peak_bytes": 5_000_000,
        "baselines": {"sort": 1234.5},
    }
    other = {"case": "b", "wire_bytes": {"winners": 2_000_000}, "baselines": {}}
    record = {
        "device": "d",
        "versions": {"jax": "1"},
        "commit": "c",
        "date": "2000-01-02",
        "rows": [row, other],
    }
    lines = [
        re.split(r" *\| *", line.strip("| ")) for line in tables({"x.d": record}).splitlines() if "|" in line
    ]
    assert lines[0] == [
        "case",
        "time us",
        "floor us",
        "time / floor",
        "temporaries MB",
        "sort, us",
        "winners, MB",
    ]
    assert lines[2] == ["a", "30", "20", "1.5", "5", "1,234"]
    assert lines[3][0] == "b" and lines[3][-1] == "2"


def test_cases_of_one_name_are_told_apart_and_times_by_the_hosts_clock_come_with_their_spread():
    rows = [
        {"case": "a", "what": what, "time_us": 3.0, "clock": "host", "spread": spread}
        for what, spread in (("x", 4.0), ("y", 5.0))
    ]
    record = {"device": "d", "versions": {}, "commit": "c", "date": "2000-01-02", "rows": rows}
    told = tables({"x.d": record})
    assert "\n| case | what | time us |\n| --- | --- | ---: |\n| a | x | 3 |\n| a | y | 3 |\n" in told
    assert "4 to 5 us apart" in told
