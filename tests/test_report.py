"""`docs/measured.md` is what the report draws from the records, and says what they say."""

import re
from pathlib import Path

from benchmarks.measure import RESULTS
from benchmarks.report import read_records, tables

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_tables_in_the_docs_are_those_of_the_records():
    assert (DOCS / "measured.md").read_text() == tables(read_records(RESULTS))


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
