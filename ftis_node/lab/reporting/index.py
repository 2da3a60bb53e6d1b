"""One table of all claims: `python -m ftis_node.lab.reporting.index DIR` rewrites it in DIR/README.md.

DIR holds a report's folder for each experiment. The table stands between two marks; what is around them is a person's.
Of reports with a whole grid of claims each family has one line.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.host.files import replace_text
from ftis_node.lab.reporting.book import limits, signed

BEGIN, END = "<!-- claims: written by `make evidence` -->", "<!-- end of the claims -->"
_SOURCES = {"paper": "Claims of the paper", "ours": "Claims of ours"}


def write_index(directory: Path) -> Path:
    """Puts the verdicts of every report under `directory` into its README.md.

    Raises:
        UsageError: the README.md is not there, or has no place for them.
    """
    page = directory / "README.md"
    try:
        before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as error:
        raise UsageError(f"{page} cannot be read: {error.strerror}.", "Name the folder of the reports.") from None
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UsageError(f"{page} has no place for the claims.", f"Write {BEGIN} and {END} where they belong.")
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(directory.glob("*/summary.json"))}
    replace_text(page, f"{before}{BEGIN}\n\n{_tables(reports)}\n{END}{after}")
    return page


def _tables(reports: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for source, title in _SOURCES.items():
        claims = [(name, c) for name, report in reports.items() for c in report["claims"] if c["source"] == source]
        if not claims:
            continue
        lines += [
            f"**{title}**",
            "",
            "| claim | verdict | difference [95 %] | seeds | report |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(name, claim) for name, claim in claims if not reports[name].get("grid")]
        families = {(name, c["family"]): None for name, c in claims if reports[name].get("grid")}
        for name, family in families:
            verdicts = [c["verdict"] for other, c in claims if (other, c["family"]) == (name, family)]
            lines.append(_family_line(name, family, verdicts))
        lines.append("")
    return "\n".join(lines)


def _family_line(name: str, family: str, verdicts: Sequence[str]) -> str:
    told = ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).most_common())
    return f"| {family}: {len(verdicts)} claims | {told} | | | [{name}]({name}/report.md) |"


def _line(name: str, claim: Mapping[str, Any]) -> str:
    difference = claim["difference"]
    told = "not tested: not every seed got there"
    if difference is not None and difference["mean"] is not None:
        told = f"{signed(difference['mean'])} {limits(difference['low'], difference['high'])}"
    seeds = difference["n"] if difference is not None else "–"
    return f"| {claim['text']} | {claim['verdict']} | {told} | {seeds} | [{name}]({name}/report.md) |"


if __name__ == "__main__":
    print(write_index(Path(sys.argv[1])))
