"""The report of an experiment: what was run, which claims its seeds bear out, and the tables and figures behind it."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftis_node.host.files import replace_text
from ftis_node.lab.reporting import attacks, outcomes, rows, speed, sweeps, training
from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.claims import LEVEL, Finding, judge
from ftis_node.lab.reporting.results import Results, read_results
from ftis_node.lab.reporting.statistics import MARGIN

MANY_CLAIMS = 30  # beyond which a small report counts verdicts by family

RULE = f"""\
How a claim is decided. d is the difference a − b of a seed, or (a − b) − (c − d) for a claim about two differences; a
factor that a claim names multiplies a first.

* *greater*, *less*: reproduced if the permutation test of d is significant with the sign claimed; not reproduced if it
  is significant with the other sign, or if two one-sided t tests (TOST) show that d lies within the margin.
* *same*: reproduced if TOST shows that d lies within the margin, even if it is not 0; not reproduced if the permutation
  test is significant and the mean of d is as large as the margin.
* *not worse*: reproduced if a one-sided t test shows that d is above −margin; not reproduced if d is significantly
  below 0 by the permutation test.
* All others are inconclusive, which is no evidence of sameness.

The margin is {MARGIN:g} of pass@1 where a claim names no other. "Significant" is p < {LEVEL:g} after Holm's adjustment
within the claim's family: the tests that can bear a family's claims out are adjusted together, of whatever kind, and so
are those that can speak against them. *p* is the permutation test's, two-sided and unadjusted; *p for* and *p against*
are the adjusted ones that decide. For costs (time, own completions), payloads and tokens less is better: *not worse*
turns the sign of d, and there is no margin but one that the claim names."""


def write_report(out: Path, destination: Path | None = None, *, small: bool = False) -> Path:
    """Writes report.md, its figures (PNG, SVG), tables (CSV) and summary.json; returns the path of report.md.

    Works on the trials that have finished and names the others. The same trials give the same bytes. Sections that say
    most come first: a small report (see `Book`) keeps those that its two pictures belong to, and the final values.

    Args:
        out: the experiment's directory, with `manifest.json`.
        destination: where to write; by default `report` in `out`.
        small: see `Book`.

    Raises:
        UsageError: `out` holds no manifest, or no trial has finished.
    """
    results = read_results(out)
    findings = judge(results)
    book = Book(destination or out / "report", small=small)
    _head(results, book)
    _claims(findings, results, book)
    grid = attacks.attacked(results, book)  # which is too large to be shown cell by cell
    if grid:
        outcomes.finals(results, book, drawn=False)
    else:
        speed.sooner(results, book)
        training.gradients(results, book)
        sweeps.swept(results, book)
        outcomes.curves(results, book)
        outcomes.finals(results, book, drawn=True)
    rows.learned(results, book)
    if not (grid or small):
        outcomes.differences(results, book)
        outcomes.gains(results, book)
        foreign = training.Foreign(results)
        training.weights(foreign, book)
        training.divergence(foreign, book)
        outcomes.costs(results, book)
    _summary(findings, results, book, grid=grid)
    return book.close()


def _head(results: Results, book: Book) -> None:
    manifest = results.manifest
    book.write(f"# {manifest.title or manifest.name}")
    if manifest.about:
        book.write(manifest.about.strip())
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = [f"experiment `{manifest.name}`", f"commit {' and '.join(results.commits())}", versions]
    seconds = sum(trial.seconds or 0.0 for trial in results.trials.values())
    book.write(
        f"Run: {'; '.join(fact for fact in facts if fact)}; {len(results.trials)} finished trials of "
        f"{len(results.trials) + len(results.missing)}, {seconds / 3600:.2g} hours in all; "
        f"seeds {', '.join(map(str, manifest.seeds))}."
    )
    book.write(f"Nodes: {'; '.join(results.node_label(node) for node in results.nodes())}.")
    if not book.small:
        _cells(results, book)
    _missing(results, book)


def _cells(results: Results, book: Book) -> None:
    manifest, rows = results.manifest, []
    for cell in manifest.cells:
        values = ", ".join(f"{key} {value}" for key, value in cell.values.items())
        nodes, steps = " ".join(results.nodes(cell.name)), results.steps(cell.name)
        seeds = f"{len(results.seeds(cell.name))} of {len(manifest.seeds)}"
        done = (nodes, str(steps)) if results.seeds(cell.name) else (say.NONE, say.NONE)
        how = ", ".join(part for part in (cell.collaboration, cell.pace) if part)
        rows.append((cell.name, results.label(cell.name), how, values or say.NONE, *done, seeds))
    book.table(["name", "cell", "collaboration, pace", "values", "nodes", "steps", "seeds finished"], rows)


def _missing(results: Results, book: Book) -> None:
    if not results.missing:
        return
    by_cell: dict[tuple[str, str], list[str]] = defaultdict(list)
    for missing in results.missing:
        by_cell[missing.cell, missing.why].append(str(missing.seed))
    told = [f"{results.label(cell)}: seeds {', '.join(seeds)} {why}" for (cell, why), seeds in by_cell.items()]
    book.write(
        f"**{len(results.missing)} trials are missing** ({'; '.join(told)}). Cells are compared on the seeds that both "
        "have finished."
    )


def _claims(findings: list[Finding], results: Results, book: Book) -> None:
    book.write("## Claims")
    if not findings:
        book.write("The experiment states none.")
        return
    verdicts = [finding.verdict for finding in findings]
    counts = [f"{verdicts.count(v)} {v}" for v in ("reproduced", "not reproduced", "inconclusive") if v in verdicts]
    book.write(f"Of {len(findings)} claims: {say.sentence_list(counts)}.")
    if book.small:
        _short_claims(findings, book)
        return
    header = [
        "",
        "claim",
        "test",
        "verdict",
        "difference [95 %]",
        "n",
        "p",
        "p for",
        "p against",
        "sameness: TOST p [90 %]",
    ]
    book.table(header, [_claim_row(place, finding, results) for place, finding in enumerate(findings, 1)])
    for place, finding in enumerate(findings, 1):
        if finding.notes:
            book.write(f"({place}) {'; '.join(finding.notes)}.")
    weak = [str(place) for place, f in enumerate(findings, 1) if f.floor >= LEVEL and not math.isnan(f.evidence.p)]
    if weak:
        book.write(
            f"**Too few seeds** for the claims {', '.join(weak)}: with so few, and so many claims in the family, no "
            f"result could have made their adjusted p smaller than {LEVEL:g}."
        )
    book.write(RULE)
    rows = [_flat(row) for row in _claim_facts(findings)]
    book.csv("claims", tuple(rows[0]), [tuple(row.values()) for row in rows])


def _short_claims(findings: list[Finding], book: Book) -> None:
    """A line a claim, or a line a family where there are more than `MANY_CLAIMS`; summary.json has all tests."""
    if len(findings) > MANY_CLAIMS:
        families: dict[str, list[str]] = defaultdict(list)
        for finding in findings:
            families[finding.claim.family or finding.claim.source].append(finding.verdict)
        counted = {
            family: ", ".join(f"{n} {verdict}" for verdict, n in Counter(verdicts).most_common())
            for family, verdicts in families.items()
        }
        book.table(["family", "claims", "verdicts"], [(f, str(len(families[f])), counted[f]) for f in families])
        return
    rows = []
    for finding in findings:
        claim, evidence = finding.claim, finding.evidence
        text = f"{claim.text} ({claim.source})"
        difference = say.difference(evidence.difference, _digits(finding)) if not math.isnan(evidence.p) else say.NONE
        rows.append((text, finding.verdict, difference, str(evidence.difference.n), say.probability(evidence.p)))
    book.table(["claim", "verdict", "difference [95 %]", "seeds", "p"], rows)


def _claim_row(place: int, finding: Finding, results: Results) -> list[str]:
    claim, evidence = finding.claim, finding.evidence
    digits = _digits(finding)
    test = (f"{claim.family}: " if claim.family else "") + _formula(finding, results)
    same = evidence.sameness
    sameness = f"{say.probability(same.p)} {say.limits(same.low, same.high)}" if not math.isnan(same.p) else say.NONE
    tested = not math.isnan(evidence.p)
    return [
        str(place),
        f"{claim.text} ({claim.source})",
        test,
        f"**{finding.verdict}**",
        say.difference(evidence.difference, digits) if tested else say.NONE,
        str(evidence.difference.n),
        say.probability(evidence.p),
        say.probability(finding.adjusted_for) if tested else say.NONE,
        say.probability(finding.adjusted_against) if tested else say.NONE,
        sameness,
    ]


def _digits(finding: Finding) -> int:
    return 3 if finding.claim.measure == "final" else 1


def _formula(finding: Finding, results: Results) -> str:
    claim = finding.claim
    a, b, *rest = (results.label(cell) for cell in claim.cells)
    a = a if claim.factor == 1 else f"{claim.factor:g} × {a}"
    sides = f"({a} − {b}) − ({rest[0]} − {rest[1]})" if rest else f"{a} − {b}"
    where = "all nodes" if claim.node == "all" else f"node {claim.node}"
    return f"{sides} {claim.compare}; {claim.measure}, {where}, {claim.on}"


def _claim_facts(findings: list[Finding]) -> list[dict[str, Any]]:
    return [
        {
            **finding.claim.model_dump(by_alias=True),
            "verdict": finding.verdict,
            "difference": asdict(finding.evidence.difference),
            "p": finding.evidence.p,
            "margin_used": finding.evidence.margin,
            "sameness": asdict(finding.evidence.sameness),
            "p_not_worse": finding.evidence.p_not_worse,
            "p_for": finding.evidence.p_for,
            "p_against": finding.evidence.p_against,
            "adjusted_for": finding.adjusted_for,
            "adjusted_against": finding.adjusted_against,
            "least_possible": finding.floor,
            "notes": list(finding.notes),
        }
        for finding in findings
    ]


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Nested figures as columns of their own, lists as text."""
    row: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, dict):
            row |= {f"{key}_{name}": part for name, part in value.items()}
        else:
            row[key] = "; ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return row


def _summary(findings: list[Finding], results: Results, book: Book, *, grid: bool) -> None:
    manifest = results.manifest
    summary = {
        "schema": 1,
        "name": manifest.name,
        "commits": results.commits(),
        "file_sha256": manifest.file_sha256,
        "grid": grid,
        "finished": {cell: results.seeds(cell) for cell in results.cells},
        "missing": [asdict(missing) for missing in results.missing],
        "claims": _claim_facts(findings),
        "final": outcomes.final_values(results),
    }
    replace_text(book.directory / "summary.json", json.dumps(_finite(summary), indent=1, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON knows neither nan nor inf: they become null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
