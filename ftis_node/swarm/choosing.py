"""The choice of packets to pull: authors take turns, and newcomers have what is left for them."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from ftis_node.swarm.known import Known, Target
from ftis_node.swarm.pool import Newcomers

# One newcomer packet in so many is from an author drawn at random; the rest from authors close to a record.
EXPLORED_PART = 4
NEAR_SECONDS = 60.0  # packets of an author that are not older by more have about the same age


@dataclass
class Offer:
    """Packets of an announcement that may be chosen, a bit mask over its packets."""

    known: Known
    packets: int


def _turns(by_author: Mapping[bytes, Sequence[Offer]], newcomers: Newcomers, rng: random.Random) -> Iterator[bytes]:
    """The authors in the order of their turns: each has one before any has another. It ends if nobody may offer more.

    Of two random ones it is the turn of that with the fresher announcement. A newcomer is replaced, three times in
    four, by the newcomer closest to a record: if all newcomers of a large swarm took turns, none would ever get one.
    An author has a record after 20 groups trained on with sound claims (`books.Author`).

    Args:
        by_author: the offers that are left, the best of each author last. The caller takes from them after each turn,
            counts what it took among the newcomers' groups, and removes an author without offers.
    """
    strangers = set(filter(newcomers.is_one, by_author))
    waiting = list[bytes]()
    nearest: Iterator[bytes] = iter(())  # the newcomers that have begun a record, the longest first
    while True:
        shut = strangers if newcomers.full else set()
        waiting = [author for author in waiting if author not in shut]
        if not waiting:
            waiting = [author for author in by_author if author not in shut]
            begun = [author for author in waiting if author in strangers and newcomers.record(author)]
            nearest = reversed(sorted(begun, key=newcomers.record))
        if not waiting:
            return
        pair = rng.sample(waiting, min(2, len(waiting)))
        author = max(pair, key=lambda one: by_author[one][-1].known.born)  # the fresher
        if author in strangers and rng.randrange(EXPLORED_PART):
            author = next((one for one in nearest if one in waiting), author)  # each comes once in a round of turns
        waiting.remove(author)
        yield author


def choose(
    offers: Iterable[Offer],
    count: int,
    newcomers: Newcomers,
    peers: Set[bytes],
    rng: random.Random,
) -> list[Target]:
    """Choose up to `count` packets by turns of their authors, an author's freshest first.

    In simulation this spreads load and influence, where "freshest first" takes everything from one author. The result
    is in the order of the choice. Of an announcement's packets the last goes first.

    Args:
        offers: used up; each offers at least one packet.
        newcomers: what is chosen from them counts against their room.
        peers: of an author's packets of about one age, one that these hold besides it goes first, so that not all ask
            the author.
    """
    by_author = dict[bytes, list[Offer]]()
    for offer in sorted(offers, key=lambda one: one.known.born):
        by_author.setdefault(offer.known.author, []).append(offer)
    chosen = []
    for author in islice(_turns(by_author, newcomers, rng), count):
        left = by_author[author]
        offer = _near_copy(left, peers)
        copied = offer.known.copied_among(peers) & offer.packets
        index = (copied or offer.packets).bit_length() - 1
        newcomers.took(author)
        chosen.append(Target(offer.known, index))
        offer.packets &= ~(1 << index)
        if not offer.packets:
            left.remove(offer)
        if not left:
            del by_author[author]
    return chosen


def _near_copy(offers: Sequence[Offer], peers: Set[bytes]) -> Offer:
    """The best of an author's offers, which is the last; but of those that are at most a minute older, the freshest of
    which these peers hold a packet."""
    best = offers[-1]
    for offer in reversed(offers):
        if offer.known.born < best.known.born - NEAR_SECONDS:
            break
        if offer.known.copied_among(peers) & offer.packets:
            return offer
    return best


def choose_by_row(
    by_row: Mapping[int, Sequence[Offer]],
    count: int,
    newcomers: Newcomers,
    rng: random.Random,
) -> list[Target]:
    """Choose up to `count` packets, one of each row: of the author that was chosen least; among newcomers, three times
    in four, of the one closest to a record.

    Args:
        by_row: the offers of each row, the most wanted row first; each offers a packet of its row. A row of newcomers
            without room keeps no other out.
        newcomers: what is chosen from them counts against their room.
    """
    times = Counter[bytes]()
    chosen = list[Target]()
    for row, offers in by_row.items():
        if len(chosen) >= count:
            break
        by_author = {offer.known.author: offer for offer in offers}
        fitting = list(filter(newcomers.may, by_author))
        if not fitting:
            continue
        author = min(fitting, key=lambda one: (times[one], rng.random()))
        if newcomers.is_one(author) and rng.randrange(EXPLORED_PART):
            alike = filter(newcomers.is_one, fitting)
            author = min(alike, key=lambda one: (times[one], -newcomers.record(one)))
        times[author] += 1
        newcomers.took(author)
        offer = by_author[author]
        answers = (index for index, answered in offer.known.rows.items() if answered == row)
        index = next(index for index in answers if offer.packets >> index & 1)
        chosen.append(Target(offer.known, index))
    return chosen
