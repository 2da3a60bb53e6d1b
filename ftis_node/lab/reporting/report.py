"""The report of an experiment: what was run, which claims its seeds bear out, and the tables and figures behind it."""

import json
import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftis_node.host.files import replace_text
from ftis_node.lab.events import mapped
from ftis_node.lab.reporting import attacks, outcomes, speed
from ftis_node.lab.reporting import page as say
from ftis_node.lab.reporting.claims import Finding, judge
from ftis_node.lab.reporting.page import ReportPage
from ftis_node.lab.reporting.results import Results, read_results

MANY_CLAIMS = 30  # beyond which verdicts are counted by family


def write_report(out: Path, destination: Path | None = None) -> Path:
    """Writes report.md, its pictures, seeds.csv and summary.json; returns the path of report.md.

    Works on the trials that have finished and names the others. The same trials give the same bytes. Sections that say
    most come first, for the first two pictures are drawn. docs/lab.md says how claims are decided.

    Args:
        out: the experiment's directory, with `manifest.json`.
        destination: where to write; by default `report` in `out`.

    Raises:
        UsageError: `out` holds no manifest, or no trial has finished.
    """
    results = read_results(out)
    findings = judge(results)
    page = ReportPage(destination or out / "report")
    _head(results, page)
    _claims(findings, page)
    grid = attacks.attacked(results, page)  # which is too large to be shown cell by cell
    if not grid:
        speed.sooner(results, page)
        outcomes.curves(results, page)
    outcomes.write_final_values(results, page, drawn=not grid)
    _summary(findings, results, page, grid=grid)
    return page.close()


def _head(results: Results, page: ReportPage) -> None:
    """Title, what was run by what, and what is missing."""
    manifest = results.manifest
    page.write(f"# {manifest.title or manifest.name}")
    if manifest.about:
        page.write(manifest.about.strip())
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = [f"experiment `{manifest.name}`", f"commit {' and '.join(results.commits())}", versions]
    page.write(
        f"Run: {'; '.join(fact for fact in facts if fact)}; {len(results.trials)} finished trials of "
        f"{len(results.trials) + len(results.missing)}, {results.cpu_hours():g} CPU-hours in all; "
        f"seeds {', '.join(map(str, manifest.seeds))}."
    )
    page.write(f"Nodes: {'; '.join(results.node_label(node) for node in results.nodes())}.")
    by_cell: dict[tuple[str, str], list[str]] = defaultdict(list)
    for missing in results.missing:
        by_cell[missing.cell, missing.why].append(str(missing.seed))
    told = []
    for (cell, why), seeds in by_cell.items():
        told.append(f"{results.label(cell)}: seeds {', '.join(seeds)} {why}")
    if told:
        page.write(
            f"**{len(results.missing)} trials are missing** ({'; '.join(told)}). Cells are compared on the seeds that "
            "both have finished."
        )


def _claims(findings: list[Finding], page: ReportPage) -> None:
    """A line a claim, or a line a family where there are more than `MANY_CLAIMS`; summary.json has all tests."""
    page.write("## Claims")
    if not findings:
        page.write("The experiment states none.")
        return
    verdicts = [finding.verdict for finding in findings]
    counts = []
    for verdict in ("reproduced", "not reproduced", "inconclusive"):
        if verdict in verdicts:
            counts.append(f"{verdicts.count(verdict)} {verdict}")
    page.write(f"Of {len(findings)} claims: {', '.join(counts)}.")
    if len(findings) > MANY_CLAIMS:
        families = [finding.claim.family or finding.claim.source for finding in findings]
        counted = say.tallied(zip(families, verdicts, strict=True))
        page.table(["family", "claims", "verdicts"], counted)
        return
    rows = []
    for finding in findings:
        claim = finding.claim
        evidence = finding.evidence
        text = f"{claim.text} ({claim.source})"
        digits = 1
        if claim.measure == "final":
            digits = 3
        difference = say.NONE
        if not math.isnan(evidence.difference.mean):
            difference = say.difference(evidence.difference, digits)
        if evidence.collapsed:
            difference += f"; of all {say.signed(evidence.mean, digits)}"
        seeds = say.pairs(evidence.difference.n, evidence.collapsed)
        rows.append((text, finding.verdict, difference, seeds, say.probability(evidence.p)))
    page.table(["claim", "verdict", "difference [95 %]", "seeds", "p"], rows)


def _claim_facts(finding: Finding) -> dict[str, Any]:
    """What summary.json says of a claim; `index` reads it, also from older reports."""
    return {
        **finding.claim.model_dump(by_alias=True),
        "verdict": finding.verdict,
        **asdict(finding.evidence),
        "adjusted_for": finding.adjusted_for,
        "adjusted_against": finding.adjusted_against,
    }


def _summary(findings: list[Finding], results: Results, page: ReportPage, *, grid: bool) -> None:
    """Writes the report for programs, `summary.json`. grid: whether the page has the section on attacks."""
    manifest = results.manifest
    summary = {
        "schema": 1,
        "name": manifest.name,
        "commits": results.commits(),
        "file_sha256": manifest.file_sha256,
        "grid": grid,
        "finished": {cell: results.seeds(cell) for cell in results.cells},
        "missing": [asdict(missing) for missing in results.missing],
        "cpu_hours": results.cpu_hours(),
        "claims": list(map(_claim_facts, findings)),
        "final": outcomes.final_values(results),
    }
    text = json.dumps(mapped(summary, _finite), indent=1, ensure_ascii=False)
    replace_text(page.directory / "summary.json", f"{text}\n")


def _finite(number: float) -> float | None:
    """None for nan and inf, which JSON does not know."""
    if math.isfinite(number):
        return number
    return None
