"""All attacks, in the order of the table of what a node must survive."""

from __future__ import annotations

from tests.hostile import content, directory, identity, reputation, streams, wire
from tests.hostile.attack import Attack

ATTACKS: tuple[type[Attack], ...] = (
    content.Row01Malformed,
    wire.Row02ExtBomb,
    wire.Row02DhtCalls,
    wire.Row03Oversize,
    content.Row04OtherTokens,
    content.Row05LogProbs,
    identity.Row06Forged,
    identity.Row07Replayed,
    identity.Row07Aged,
    content.Row08Reward,
    content.Row09CherryPicked,
    content.Row09SkippedRounds,
    content.Row10LyingLogProbs,
    content.Row11MaliciousText,
    content.Row12Padded,
    content.Row13HangingAnswers,
    identity.Row14Escapes,
    identity.Row15Sybils,
    wire.Row16Eclipse,
    wire.Row17Streams,
    wire.Row17Readers,
    wire.Row17Holders,
    identity.Row31Calls,
    identity.Row31Flood,
    content.Row32NoSignal,
    directory.Row38MadeUp,
    streams.Row33NeverRead,
    streams.Row33HalfOpen,
    streams.Row39Relay,
    streams.Row40Debug,
    streams.Row41Requests,
    reputation.Row34Contradictions,
    reputation.Row36Downwards,
    reputation.Row37Introducers,
    reputation.Row44Large,
)


def chosen(rows: str) -> list[type[Attack]]:
    """The attacks of these rows: numbers separated by commas, or "all"."""
    wanted = {attack.row for attack in ATTACKS} if rows == "all" else {int(row) for row in rows.split(",")}
    unknown = wanted - {attack.row for attack in ATTACKS}
    if unknown:
        raise ValueError(f"there are no attacks for rows {sorted(unknown)}")
    return [attack for attack in ATTACKS if attack.row in wanted]
