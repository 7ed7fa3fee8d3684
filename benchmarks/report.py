"""Draws what the benchmarks measured: `docs/measured.md`, tables in other documents, pictures.

    python -m benchmarks.report            # all
    python -m benchmarks.report --no-plots # the tables alone, without matplotlib

Reads every record in benchmarks/results/ and adds nothing to it but the ratio to the floor.
"""

import argparse
import json
from pathlib import Path

from benchmarks.measure import RESULTS

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Documents that hold the table of `longest_cases` between two marks.
HOLDERS = (DOCS.parent / "README.md", DOCS / "kernels.md")
_MARKS = ("<!-- measured -->\n", "<!-- /measured -->\n")
# Columns of a table and their heads, in this order; a record without a field has no such column.
_TIMES = {
    "time_us": "time us",
    "least_us": "least waiting us",
    "floor_us": "floor us",
    "ratio": "time / floor",
    "allowed_us": "allowed us",
    "r1_us": "one read us",
    "tail_us": "tail us",
    "host_us": "host us",
    "busy_us": "kernels us",
    "period_us": "period us",
    "gap_us": "gap us",
    "head_us": "head us",
    "sampling_us": "sampling us",
    "gather_ratio": "all-gather's sampling / this",
    "wire_us": "wire at best us",
    "over_plain": "over plain",
    "over_percent": "over plain %",
}
_BYTES = {
    "peak_bytes": "temporaries MB",
    "logits_bytes": "logits MB",
    "moved_bytes": "moved MB",
    "received_bytes": "received MB",
}
_NAMED = {"stages_us": ("{}, us", 1.0), "wire_bytes": ("{}, MB", 1e6), "baselines": ("{}, us", 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true", help="write the tables alone")
    options = parser.parse_args()
    records = read_records(RESULTS)
    (DOCS / "measured.md").write_text(tables(records))
    for path in HOLDERS:
        path.write_text(with_table(path.read_text(), longest_cases(records)))
    if not options.no_plots:
        for name, record in records.items():
            plot(name, record, DOCS / "plots")


def read_records(folder: Path) -> dict[str, dict]:
    """NAME.DEVICE -> record, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def tables(records: dict[str, dict]) -> str:
    """Markdown: one table for each record."""
    parts = [
        "# Measured\n\n"
        "Made by `python -m benchmarks.report` from `benchmarks/results/`; every record comes from\n"
        "`python -m benchmarks.bench_NAME`. Medians. The floor is the time to move the bytes that must\n"
        "move, at the bandwidth measured in the same run. Pictures of time over floor: `docs/plots/`.\n"
    ]
    for name, record in records.items():
        versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
        rows = [_cells(row) for row in record["rows"]]
        heads = _in_order(rows)
        parts.append(
            f"## {name}\n\n{record['device']}; {versions}; commit {record['commit']}; {record['date']}.\n"
        )
        parts += _noise(record["rows"])
        names = _names(record["rows"])
        first = ["case", "what"][: len(names[0])]
        lines = [_line([*first, *heads]), _line(["---"] * len(first) + ["---:"] * len(heads))]
        for name, cells in zip(names, rows, strict=True):
            lines.append(_line([*name, *(cells.get(head, "") for head in heads)]))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def longest_cases(records: dict[str, dict]) -> str:
    """Markdown: of each record with floors and each thing it measured, the case that takes longest."""
    lines = [
        "| what | case | us | floor us | time / floor | others, us |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, record in records.items():
        longest: dict[str, dict] = {}
        for row in record["rows"]:
            if "time_us" in row and "floor_us" in row:
                known = longest.setdefault(row["what"], row)
                if row["time_us"] > known["time_us"]:
                    longest[row["what"]] = row
        for what, row in longest.items():
            others = ", ".join(f"{way} {_number(time)}" for way, time in row.get("baselines", {}).items())
            figures = [row["time_us"], row["floor_us"], row["time_us"] / row["floor_us"]]
            cells = [f"{name}: {what}", row["case"], *map(_number, figures), others]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """A document with the table between its two marks, in place of what is there; else a ValueError."""
    before, begin, rest = text.partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    if not begin or not end:
        raise ValueError(f"the document has no lines {_MARKS[0].strip()} and {_MARKS[1].strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def plot(name: str, record: dict, folder: Path) -> None:
    """NAME.DEVICE.png: time over floor, cases beside their baselines; none for a record without floors."""
    rows = [row for row in record["rows"] if "floor_us" in row and "time_us" in row]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = ["jaxsample", *dict.fromkeys(way for row in rows for way in row.get("baselines", {}))]
    bars, ticks, place = [], [], 0.0  # a bar is (place, way, ratio); cases lie half a bar apart
    for row in rows:
        times = {"jaxsample": row["time_us"], **row.get("baselines", {})}
        ticks.append(place + (len(times) - 1) / 2)
        bars += [(place + i, way, time / row["floor_us"]) for i, (way, time) in enumerate(times.items())]
        place += len(times) + 0.5
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.16 * place), layout="constrained")
    for way in ways:
        own = [(place, ratio) for place, name, ratio in bars if name == way]
        drawn = axes.barh(*zip(*own, strict=True), 0.9, label=way)
        axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(ticks, [", ".join(name) for name in _names(rows)], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time over floor")
    axes.set_title(f"{name}: {record['device']}", fontsize=9)
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _names(rows: list[dict]) -> list[tuple[str, ...]]:
    """What tells the rows of a record apart: the case, and what was measured where cases repeat."""
    cases = [row["case"] for row in rows]
    if len(set(cases)) == len(cases):
        return [(case,) for case in cases]
    return [(row["case"], row["what"]) for row in rows]


def _noise(rows: list[dict]) -> list[str]:
    """A sentence about times by the host's clock, where a record has them."""
    spreads = [row["spread"] for row in rows if row.get("clock") == "host" and "spread" in row]
    if not spreads:
        return []
    least, most = _number(min(spreads)), _number(max(spreads))
    return [
        f"Times by the host's clock; the quartiles of a case lie {least} to {most} us apart. A difference\n"
        "between cases that is not larger may be noise.\n"
    ]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: dict) -> dict[str, str]:
    """Head -> text, for what a row holds."""
    if "time_us" in row and "floor_us" in row:
        row = {**row, "ratio": row["time_us"] / row["floor_us"]}
    cells = {head: _number(row[key]) for key, head in _TIMES.items() if key in row}
    cells |= {head: _number(row[key] / 1e6) for key, head in _BYTES.items() if key in row}
    for key, (head, unit) in _NAMED.items():
        cells |= {head.format(name): _number(value / unit) for name, value in row.get(key, {}).items()}
    return cells


def _in_order(rows: list[dict[str, str]]) -> list[str]:
    """All heads, those of `_TIMES` and `_BYTES` first."""
    found = dict.fromkeys(head for row in rows for head in row)
    known = [head for head in (*_TIMES.values(), *_BYTES.values()) if head in found]
    return known + [head for head in found if head not in known]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
