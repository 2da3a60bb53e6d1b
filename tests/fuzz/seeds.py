"""Valid inputs of every target, and some that are refused late: fuzzing starts from these."""

from collections.abc import Sequence
from dataclasses import astuple, replace

import msgpack
import numpy as np
from google.protobuf.message import Message
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P
from hivemind.utils.serializer import MSGPackSerializer

from ftis_node.config.run import Hints, Run, RunFile, run_file_as_json
from ftis_node.packet import Completion, TextCompletion, encode, pack_text_group
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement, PacketRef, announce
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.known import announcement_id
from ftis_node.swarm.limits import OWN as LIMITS
from ftis_node.swarm.wire.records import OwnerSigned, key_bytes, pack_addresses
from tests.fuzz.frames import Frame, join
from tests.fuzz.messages import ADDRESSES, HELD
from tests.fuzz.world import AUTHOR, EOS, HORIZONTAL, NOW, PEERS, RUN, TEXT, TURNS, drawn_digest, stopped_clock
from tests.support.swarm import CAP, content, episode, store_request


def packets() -> list[bytes]:
    """One of each kind of run, and of other rounds and slots."""
    rounds = (packet(), packet(HORIZONTAL), packet(slot=5), packet(round=1 << 60))
    return [*rounds, text_packet(), turn_packet()]


def packet(run: Run = RUN, round: int = 7, slot: int = 3) -> bytes:
    """A packet that is admitted: finished completions and one that reached the cap."""
    completions = [_completion(CAP, finished=False)]
    for length in range(2, run.completions + 1):
        one = _completion(length, finished=True)
        one.token_ids[-1] = EOS[length % 2]
        completions.append(one)
    return encode(content(run, AUTHOR.author, round, slot, completions, policy_step=40))


def _completion(length: int, *, finished: bool) -> Completion:
    claims = np.full(length, -0.5, np.float32)
    return Completion(np.arange(length, dtype=np.uint32), claims, finished)


def text_packet() -> bytes:
    """A packet of text that is admitted: finished completions, one at the cap in tokens, one that was aborted."""
    place = {
        "run_id": TEXT.id,
        "author": AUTHOR.author,
        "round": 7,
        "slot": 3,
        "policy_step": 40,
    }
    completions = [
        _text("é1234".encode(), [2, 3, 1], -0.5),
        _text(b"x" * TEXT.completion_tokens, [1] * TEXT.completion_tokens, None),
        _text("é12".encode(), [4, 0], None),
        _text(b"", [], -0.25),
    ]
    made = pack_text_group(**place, prompt="", completions=completions)
    return encode(replace(made, prompt_digest=drawn_digest(TEXT, AUTHOR.author, 7, 3)))


def _text(text: bytes, sizes: Sequence[int], end: float | None) -> TextCompletion:
    claims = np.full(len(sizes), -0.5, np.float32)
    return TextCompletion(text, np.array(sizes, np.uint8), claims, end)


def turn_packet() -> bytes:
    """A packet of episodes that is admitted: of one, two and three answers, and one that was cut off."""
    completions = [
        episode([1, 998]),
        episode([2, 999], [998, 3], [998]),
        episode([999], [4], [5, 998], [6], [7, 999]),
        episode([8] * CAP, finished=False),
    ]
    return encode(content(TURNS, AUTHOR.author, 7, 3, completions, policy_step=40, turns=True))


def announcements() -> list[bytes]:
    """Of several packets, of one, and of more than this node holds."""
    return [announcement(packets=count).encode() for count in (3, 1, 12)]


def announcement(who: Identity = AUTHOR, round: int = 1, packets: int = 3) -> Announcement:
    """Of so many packets: first of those that this node holds, then of others."""
    digests = [*HELD, *[bytes(32)] * 9]
    refs = []
    for slot in range(packets):
        refs.append(PacketRef(slot, digests[slot], 500 + slot, 1))
    return announce(
        who,
        run_id=RUN.id,
        round=round,
        policy_step=round,
        issued_at=NOW,
        packets=refs,
    )


def _said(kind: int, peer: int, message: Message) -> Frame:
    return Frame(kind, peer, message.SerializeToString())


def conversations() -> list[bytes]:
    """Exchanges: everything at once; a contradiction; an answer that got lost."""
    told = []
    for who in PEERS[1:4]:
        told += [announcement(who, 1).encode(), announcement(who, 2).encode()]
    contradiction = ftis_pb2.Entry(announcement=announcement(AUTHOR, 1, 2).encode())
    entries = [ftis_pb2.Entry(announcement=data, age_ms=1500, held=b"\x05") for data in told]
    mentions = [ftis_pb2.Mention(id=announcement_id(data), held=b"\x03") for data in told]
    wanted = [mention.id for mention in mentions]
    ask = ftis_pb2.ExchangeRequest
    answer = ftis_pb2.ExchangeResponse
    everything = ask(entries=entries, mentions=mentions, wanted=wanted, again=True)
    contradicted = [
        _said(0, 2, ask(mentions=mentions)),
        _said(1, 2, answer(entries=entries[:3], mentions=mentions, wanted=wanted)),
        Frame(2, 2, bytes(60)),
        _said(0, 4, ask(entries=[contradiction])),
    ]
    lost = [
        _said(0, 3, ask(mentions=mentions)),
        Frame(1, 3, b"\xff"),
        _said(1, 3, answer(entries=entries, stranger=True, peers=ADDRESSES)),
    ]
    return [join([_said(0, 2, everything)]), join(contradicted), join(lost)]


def handshakes() -> list[bytes]:
    """Of peers of this run, with all that there may be in one; of another run; of another version."""
    told = greeting(RUN, ADDRESSES[2:3])
    told.peers.extend(ADDRESSES)
    told.run_file = run_file_as_json(RunFile(run=RUN))
    told.limits.CopyFrom(LIMITS.message())
    greetings = [
        _said(0, 3, greeting(RUN, ADDRESSES[3:5])),
        _said(0, 4, greeting(None, [])),
    ]
    other = greeting(HORIZONTAL, [])
    refusing = ftis_pb2.Handshake(major=3, refusal="you speak \x1b[31manother protocol", agent="\u202eanother/1")
    refused = []
    for kind in range(3):
        refused += [_said(kind, 5, other), _said(kind, 5, refusing)]
    return [join(greetings), join([_said(1, 2, told), _said(2, 2, told)]), join(refused)]


def _store(*records: DHTRecord) -> bytes:
    return bytes(store_request(*map(astuple, records)).SerializeToString())


def dht_records() -> list[bytes]:
    key = key_bytes(RUN.id)
    made = []
    for who in PEERS[1:3]:
        value = MSGPackSerializer.dumps(pack_addresses(ADDRESSES))
        unsigned = DHTRecord(key, MSGPackSerializer.dumps(who.peer_id), value, NOW + 240.0)
        signed = OwnerSigned(who, RUN.id).sign_value(unsigned)
        made.append(replace(unsigned, value=signed))
    whole = DictionaryDHTValue()
    with stopped_clock():
        for who, record in zip(PEERS[1:3], made, strict=True):
            whole.store(who.peer_id, record.value, record.expiration_time)
    nested = msgpack.packb([])
    for _ in range(6):
        nested = msgpack.packb([msgpack.ExtType(0x40, nested)])
    dictionary = DHTRecord(key, b"", MSGPackSerializer.dumps(whole), NOW + 240.0)
    bomb = replace(dictionary, value=nested)
    nobody = replace(made[0], subkey=b"\xc0")
    return [_store(*made), _store(dictionary), _store(bomb), _store(nobody)]


def run_files() -> list[bytes]:
    hints = Hints(name="a run", bootstraps=ADDRESSES[:3], contact="somebody")
    several_lines = RUN.model_copy(update={"template": 'Solve:\n\t"{question}" \\ \x7f'})
    files = [
        RunFile(run=RUN),
        RunFile(run=TEXT),
        RunFile(run=TURNS),
        RunFile(run=HORIZONTAL, hints=hints),
        RunFile(run=several_lines, hints=hints),
    ]
    by_hand = ' { "hints": {"name": "\\u0041\\n"}, "run": {"group": 4, "eos": [], "temperature": 1e2} }\n'
    return [*(run_file_as_json(file).encode() for file in files), by_hand.encode()]


def streams() -> list[bytes]:
    chunk = ftis_pb2.FetchChunk
    first, second, _ = HELD
    here = []
    for digest, body in HELD.items():
        here.append(_said(0, 0, chunk(digest=digest, packet=body)))
    gone = _said(0, 0, chunk(digest=first, status=chunk.GONE))
    busy = _said(0, 0, chunk(digest=second, status=chunk.BUSY))
    wrong = _said(0, 0, chunk(digest=first, packet=HELD[second]))
    error = Frame(1, 0, b"\x0a\x02no")
    length = (1 << 32).to_bytes(P2P.HEADER_LEN, "big")
    huge = Frame(2, 0, P2P.MESSAGE_MARKER + length)
    return [
        join(here),
        join([gone, busy, here[2]]),
        join([here[0], wrong]),
        join([here[0], error]),
        join([huge]),
    ]


def requests() -> list[bytes]:
    known = _said(0, 2, ftis_pb2.FetchRequest(digests=[*HELD, bytes(32)]))
    many = _said(0, 2, ftis_pb2.FetchRequest(digests=list(HELD) * 30))
    return [join([known, known]), join([many])]


def addresses() -> list[bytes]:
    """Of each kind that a peer may have."""
    others = [
        f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{AUTHOR.peer_id}",
        f"{ADDRESSES[2]}/p2p-circuit/p2p/{AUTHOR.peer_id}",
        f"/dns4/example.org/tcp/4001/p2p/{AUTHOR.peer_id}",
    ]
    return [text.encode() for text in (*ADDRESSES[:2], *others)]
