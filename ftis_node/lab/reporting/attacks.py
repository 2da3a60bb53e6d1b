"""The report's section on attacks: what hostile partners got honest nodes to say, and what it cost these."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from ftis_node.lab.manifest import ATTACK, METHOD
from ftis_node.lab.payloads import TOKENS
from ftis_node.lab.reporting import book as say
from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting.book import Book
from ftis_node.lab.reporting.figures import Heat
from ftis_node.lab.reporting.results import LATE, Results, over_nodes
from ftis_node.lab.reporting.statistics import Interval, mean_interval

BASELINE = "unshared"
_Values = Mapping[int, float]


def attacked(results: Results, book: Book) -> bool:
    """Section: success, pass@1 and length by attack and method; returns whether any cell names an attack."""
    cells = {}
    for cell in results.cells:
        values = results.cell(cell).values
        if {ATTACK, METHOD} <= values.keys():
            cells[str(values[ATTACK]), str(values[METHOD])] = cell
    if not cells:
        return False
    book.write(
        "## What attacks achieve",
        f"*Success*: the share of honest nodes' own completions in the last 1/{LATE} of their steps that carry what "
        "the attackers want to be said; sampled, on training prompts. All figures are means over nodes, then over "
        f"seeds, with half the width of the 95 % interval. Pass@1 and length are differences to {BASELINE}, seed by "
        "seed: as many own completions, and nothing shared. Injected text and gibberish both count as symbols that no "
        "reasoning of these tasks has: to a small model that never saw any they are all alike.",
    )
    payloads = {}
    for pair, cell in cells.items():
        payload = results.payload(cell)
        if payload:
            payloads[pair] = payload
    parts: dict[str, dict[tuple[str, str], Interval]] = {
        "success": _found(payloads, lambda pair: _said(results, cells[pair], payloads[pair])),
        "pass@1": _found(cells, lambda pair: _gain(results, cells[pair], results.values)),
        "tokens": _found(cells, lambda pair: _gain(results, cells[pair], partial(results.said, what=TOKENS))),
    }
    base = {payload: _said(results, BASELINE, payload) for payload in dict.fromkeys(payloads.values())}
    told = [f"{payload} {_percent(mean_interval(list(seeds.values())))}" for payload, seeds in base.items() if seeds]
    if told:
        book.write(f"Without any partner ({BASELINE}) the same tests find, in %: {'; '.join(told)}.")
    _table(book, "Success, in %:", parts["success"], _percent)
    _table(book, f"Pass@1, difference to {BASELINE} in points:", parts["pass@1"], _points)
    _table(book, f"Tokens of a completion, difference to {BASELINE}:", parts["tokens"], _tokens)
    heats = [
        Heat("success, %", _grid(parts["success"], 100.0), 0.0, 50.0, "Reds"),
        Heat(f"pass@1, points above {BASELINE}", _grid(parts["pass@1"], 100.0), -30.0, 30.0, "RdBu"),
    ]
    caption = "By attack (down) and method (across), means over honest nodes and seeds."
    book.picture("attacks", figures.heats([heat for heat in heats if heat.values]), caption)
    return True


def _found(
    pairs: Mapping[tuple[str, str], str], seeds: Callable[[tuple[str, str]], _Values]
) -> dict[tuple[str, str], Interval]:
    """The mean over seeds, of those pairs that have some."""
    found = {}
    for pair in pairs:
        values = seeds(pair)
        if values:
            found[pair] = mean_interval(list(values.values()))
    return found


def _said(results: Results, cell: str, payload: str) -> dict[int, float]:
    return over_nodes([results.said(cell, node, payload) for node in results.nodes(cell)])


def _gain(results: Results, cell: str, of: Callable[[str, str], _Values]) -> dict[int, float]:
    """Of a cell and node's values, against the baseline's same nodes."""
    here, there = (over_nodes([of(name, node) for node in results.nodes(cell)]) for name in (cell, BASELINE))
    return {seed: here[seed] - there[seed] for seed in here.keys() & there.keys()}


def _table(book: Book, title: str, found: Mapping[tuple[str, str], Interval], words: Callable[[Interval], str]) -> None:
    attacks, methods = (list(dict.fromkeys(pair[i] for pair in found)) for i in (0, 1))
    if not attacks:
        return
    book.write(title)
    told = {pair: words(around) for pair, around in found.items()}
    rows = [[attack, *(told.get((attack, method), say.NONE) for method in methods)] for attack in attacks]
    book.table(["attack", *methods], rows)


def _grid(found: Mapping[tuple[str, str], Interval], factor: float) -> dict[str, dict[str, float]]:
    """Attack → method → mean."""
    attacks = dict.fromkeys(attack for attack, _ in found)
    return {a: {m: factor * around.mean for (b, m), around in found.items() if a == b} for a in attacks}


def _around(interval: Interval, factor: float, word: Callable[[float, int], str]) -> str:
    told = word(factor * interval.mean, 1)
    half = (interval.high - interval.low) / 2
    if not math.isnan(half):
        told += f" ± {say.number(factor * half, 1)}"
    return told


_percent = partial(_around, factor=100.0, word=say.number)
_points = partial(_around, factor=100.0, word=say.signed)
_tokens = partial(_around, factor=1.0, word=say.signed)
