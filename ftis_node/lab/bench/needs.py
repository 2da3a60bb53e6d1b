"""The cost of pulling by need: the rows of a full table's packets, and the choice of answers to a book of needs."""

from __future__ import annotations

import random

from ftis_node.lab.bench.packets import GROUP, ROWS, make_context, make_run
from ftis_node.lab.bench.reading import median_us
from ftis_node.swarm.announcement import Announcement, PacketRef, PacketRefs
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.needs import ROWS_MAX, no_rows, teaching_rows
from ftis_node.swarm.table import CAPACITY, Known, Table

AUTHORS, PACKETS, ANSWERS = 64, 8, 8


def bench_needs(repeats: int) -> dict[str, float]:
    """Microseconds of CPU (median over `repeats`).

    index_us: of an announcement of 8 packets that joins a full table of 64 authors, where another makes room; less the
    same without rows. answering_us: to choose 8 answers for a full book of 4,096 rows. nothing_us: the same where
    no row of the book has an answer, so that all are looked at.
    """
    rng, run = random.Random(0), make_run(1)
    context = make_context(run)
    authors = [Identity(rng.randbytes(32)).author for _ in range(AUTHORS)]
    rounds = iter(range(1 << 32))

    def announced() -> Announcement:
        refs = [PacketRef(slot, rng.randbytes(32), 1000, GROUP // 2) for slot in range(PACKETS)]
        return Announcement(run.id, rng.choice(authors), next(rounds), 0, 0, PacketRefs.of(refs), b"")

    indexed = Table(600.0, lambda: 0.0, rng, kept_age=3600.0, rows_of=lambda made: teaching_rows(context, made))
    plain = Table(600.0, lambda: 0.0, rng, kept_age=3600.0, rows_of=no_rows)
    made = [announced() for _ in range(2 * (CAPACITY + repeats))]
    adding = {table: iter(made) for table in (indexed, plain)}

    def add(table: Table) -> None:
        table.add(next(adding[table]), b"", age=0.0, first_sender=None)

    for table in (indexed, plain):
        for _ in range(2 * CAPACITY):
            add(table)
    indexing = median_us(lambda: add(indexed), repeats) - median_us(lambda: add(plain), repeats)
    answered = {row for known in indexed for row in known.rows.values()}
    unanswered = [row for row in range(ROWS) if row not in answered]
    book, vain = rng.sample(range(ROWS), ROWS_MAX), rng.choices(unanswered, k=ROWS_MAX)
    return {
        "index_us": indexing,
        "answering_us": median_us(lambda: indexed.choose(ANSWERS, _all, rows=book), repeats),
        "nothing_us": median_us(lambda: indexed.choose(ANSWERS, _all, rows=vain), repeats),
    }


def _all(known: Known) -> int:
    return -1
