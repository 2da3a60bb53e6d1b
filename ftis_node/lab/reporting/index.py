"""The table of all claims: `python -m ftis_node.lab.reporting.index DIR` rewrites it in DIR/README.md.

DIR holds a report's folder for each experiment. The table stands between two marks; what is around them is a person's.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.host.files import replace_text
from ftis_node.lab.reporting.page import limits, pairs, signed, tallied

BEGIN = "<!-- claims: written by `make evidence` -->"
END = "<!-- end of the claims -->"


def write_index(directory: Path) -> Path:
    """Puts the verdicts of every report under `directory` into its README.md, and returns its path. The same reports
    give the same bytes.

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
    reports = {}
    for path in sorted(directory.glob("*/summary.json")):
        reports[path.parent.name] = json.loads(path.read_text())
    replace_text(page, f"{before}{BEGIN}\n\n{_tables(reports)}\n{END}{after}")
    return page


def _tables(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each claim of the paper, and for each report's own claims their number by verdict. reports: by folder,
    what their summary.json says."""
    every = []
    paper = []
    ours = []
    hours = 0.0
    for name, report in reports.items():
        hours += report["cpu_hours"]
        for claim in report["claims"]:
            every.append(("claims", claim["verdict"]))
            if claim["source"] == "paper":
                every.append(("of these the paper's", claim["verdict"]))
                paper.append(_line(name, claim))
            else:
                ours.append((name, claim["verdict"]))
    lines = [f"{hours:.0f} hours of a core.", ""]
    for whose, count, told in tallied(every):
        lines += [f"* {count} {whose}: {told}."]
    lines.append("")
    if paper:
        lines += ["**Claims of the paper**", "", "| claim | verdict | difference [95 %] | seeds | report |"]
        lines += ["|---|---|---|---|---|", *paper, ""]
    if ours:
        lines += ["**Claims of ours**", "", "| report | claims | verdicts |", "|---|---|---|"]
        for name, count, told in tallied(ours):
            lines.append(f"| [{name}]({name}/report.md) | {count} | {told} |")
        lines.append("")
    return "\n".join(lines)


def _line(name: str, claim: Mapping[str, Any]) -> str:
    """A claim's row of the table. name: of its report."""
    difference = claim["difference"]
    collapsed = claim.get("collapsed", 0)
    told = "not tested: not every seed got there"
    if collapsed:
        told = "every pair has a collapse"
    seeds = "–"
    if difference is not None:
        seeds = pairs(difference["n"], collapsed)
        if difference["mean"] is not None:
            told = signed(difference["mean"])
        if difference["low"] is not None:  # one pair has a mean and no interval
            told += f" {limits(difference['low'], difference['high'])}"
    return f"| {claim['text']} | {claim['verdict']} | {told} | {seeds} | [{name}]({name}/report.md) |"


if __name__ == "__main__":
    print(write_index(Path(sys.argv[1])))
