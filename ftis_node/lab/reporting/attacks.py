"""The report's section on attacks: what hostile partners got honest nodes to say, and what it cost these."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from ftis_node.lab.manifest import ATTACK, METHOD
from ftis_node.lab.payloads import TOKENS
from ftis_node.lab.reporting import page as say
from ftis_node.lab.reporting.page import ReportPage
from ftis_node.lab.reporting.results import LATE, Results, over_nodes
from ftis_node.lab.reporting.statistics import Interval, mean_interval

BASELINE = "unshared"
_Values = Mapping[int, float]
_Pair = tuple[str, str]  # an attack and a method


def attacked(results: Results, page: ReportPage) -> bool:
    """Section: success, pass@1 and length by attack and method; returns whether any cell names both. Without a
    cell `unshared` differences are left out."""
    cells = {}
    payloads = {}
    for cell in results.cells:
        values = results.cell(cell).values
        if not {ATTACK, METHOD} <= values.keys():
            continue
        pair = (str(values[ATTACK]), str(values[METHOD]))
        cells[pair] = cell
        payload = results.payload(cell)
        if payload:
            payloads[pair] = payload
    if not cells:
        return False
    page.write(
        "## What attacks achieve",
        f"*Success*: the share of honest nodes' own completions in the last 1/{LATE} of their steps that carry what "
        "the attackers want to be said; sampled, on training prompts. All figures are means over nodes, then over "
        f"seeds, with half the width of the 95 % interval. Pass@1 and length are differences to {BASELINE}, seed by "
        "seed: as many own completions, and nothing shared. Injected text and gibberish both count as symbols that no "
        "reasoning of these tasks has: to a small model that never saw any they are all alike.",
    )
    tokens = partial(results.said, what=TOKENS)
    success = {}
    gain = {}
    longer = {}
    for pair, cell in cells.items():
        if pair in payloads:
            success[pair] = _said(results, cell, payloads[pair])
        gain[pair] = _gain(results, cell, results.values)
        longer[pair] = _gain(results, cell, tokens)
    without = []
    for payload in dict.fromkeys(payloads.values()):
        seeds = _said(results, BASELINE, payload)
        if seeds:
            without.append(f"{payload} {_percent(mean_interval(list(seeds.values())))}")
    if without:
        page.write(f"Without any partner ({BASELINE}) the same tests find, in %: {'; '.join(without)}.")
    _table(page, "Success, in %:", success, _percent)
    _table(page, f"Pass@1, difference to {BASELINE} in points:", gain, _points)
    _table(page, f"Tokens of a completion, difference to {BASELINE}:", longer, _tokens)
    return True


def _said(results: Results, cell: str, payload: str) -> dict[int, float]:
    """Seed → share of own completions that carry the payload, the mean over nodes."""
    of_nodes = [results.said(cell, node, payload) for node in results.nodes(cell)]
    return over_nodes(of_nodes)


def _gain(results: Results, cell: str, of: Callable[[str, str], _Values]) -> dict[int, float]:
    """Seed → the mean over nodes, less the baseline's, for the seeds of both. of: seed → value of a cell and a node."""
    here = over_nodes([of(cell, node) for node in results.nodes(cell)])
    there = over_nodes([of(BASELINE, node) for node in results.nodes(BASELINE)])
    both = here.keys() & there.keys()
    return {seed: here[seed] - there[seed] for seed in both}


def _table(page: ReportPage, title: str, values: Mapping[_Pair, _Values], words: Callable[[Interval], str]) -> None:
    """A line an attack, a column a method, each the mean of its values; nothing if there are none."""
    found = {pair: list(seeds.values()) for pair, seeds in values.items() if seeds}
    if not found:
        return
    methods = dict.fromkeys(method for _, method in found)
    rows: dict[str, dict[str, str]] = {}
    for (attack, method), of_seeds in found.items():
        row = rows.setdefault(attack, dict.fromkeys(methods, say.NONE))
        row[method] = words(mean_interval(of_seeds))
    lines = [[attack, *row.values()] for attack, row in rows.items()]
    page.write(title)
    page.table(["attack", *methods], lines)


def _around(interval: Interval, factor: float, word: Callable[[float, int], str]) -> str:
    """A mean with half the width of its interval, both so many times as large."""
    told = word(factor * interval.mean, 1)
    half = (interval.high - interval.low) / 2
    if not math.isnan(half):
        told += f" ± {say.number(factor * half, 1)}"
    return told


_percent = partial(_around, factor=100.0, word=say.number)
_points = partial(_around, factor=100.0, word=say.signed)
_tokens = partial(_around, factor=1.0, word=say.signed)
