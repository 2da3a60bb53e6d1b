"""The targets: what takes bytes from strangers, and what must be true of whatever it makes of them.

A target returns if the input was read or refused as it should be; anything that it raises is a finding.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import msgpack
from google.protobuf.message import DecodeError
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from ftis_node.config.run import RUN_FILE_CHARACTERS_MAX, Run, run_file_as_json, run_file_from_json
from ftis_node.errors import UsageError
from ftis_node.packet import Group, Packet, PacketError, TextPacket, decode, encode, packet_digest
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import parse_address, ranked
from ftis_node.swarm.admission import LOGPROB_MAX, AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import decode_announcement
from ftis_node.swarm.identity import author_of, peer_id, verify
from ftis_node.swarm.signed import Malformed
from ftis_node.swarm.wire.dht_guard import GuardedDht
from ftis_node.swarm.wire.records import MAX_LIFETIME, OwnerSigned, Shelf
from tests.fuzz import messages, mutators, packed, records, seeds
from tests.fuzz.changes import Mutator, raw
from tests.fuzz.world import AUTHOR, CONTEXTS, NOW, OWN, PEERS, RUN, run_async, stopped_clock


@dataclass(frozen=True)
class Target:
    """run: reads one input. mutate: changes an input and keeps its structure. seeds: valid inputs, and some that are
    refused late, which each reach far. max_bytes: of an input."""

    run: Callable[[bytes], None]
    mutate: Mutator
    seeds: Callable[[], list[bytes]]
    max_bytes: int


# --- packets ----------------------------------------------------------------------------------------------------------


def admit_packet(data: bytes):
    """Admission, and the packet's own decoder without the size limit of a run."""
    try:
        assert encode(decode(data)) == data, "a packet has two spellings"
    except PacketError as error:
        assert str(error).isprintable(), "an error does not print"
    for context in CONTEXTS:
        verdict = admit(context, AUTHOR.author, data)
        if isinstance(verdict, Rejection):
            assert verdict.detail.isprintable(), "a refusal does not print"
        else:
            _check_admitted(context, data, verdict)


def _check_admitted(context: AdmissionContext, data: bytes, group: Group):
    """The rules of proto/PACKET.md once more, read from the bytes."""
    run = context.run
    packet = group.packet
    assert encode(packet) == data and group.digest == packet_digest(data), "it does not read back"
    assert packet.run_id == run.id and packet.slot < run.slots, "it is of another run"
    assert len(packet.lengths) == len(packet.finished) == run.completions, "a wrong number of completions"
    assert isinstance(packet, TextPacket) == run.text, "it is of another version"
    if isinstance(packet, TextPacket):
        _check_text(run, packet, data)
    else:
        _check_tokens(run, packet, data)
    round = packet.round
    slot = packet.slot
    same = admit(context, AUTHOR.author, data, announced=(round, slot), digest=group.digest)
    assert isinstance(same, Group) and same.key == (AUTHOR.author, round, slot), "it is not admitted as announced"
    elsewhere = admit(context, AUTHOR.author, data, announced=(round, slot + 1))
    _check_refused(elsewhere, Reason.NOT_AS_ANNOUNCED)
    stolen = admit(context, PEERS[2].author, data)
    _check_refused(stolen, Reason.OTHER_AUTHOR)


def _check_refused(verdict: Group | Rejection, reason: Reason):
    assert isinstance(verdict, Rejection) and verdict.reason is reason, f"not refused as {reason}"


def _check_text(run: Run, packet: TextPacket, data: bytes):
    """The fields are read by msgpack itself, which is another decoder than ours."""
    *_, sizes, text, claims = msgpack.unpackb(data)
    logprobs = [claim for (claim,) in struct.iter_unpack("<f", claims)]
    assert len(text) == sum(sizes), "text without pieces, or pieces without text"
    assert all(run.logprob_min <= claim <= LOGPROB_MAX for claim in logprobs), "an impossible log-prob"
    assert len(logprobs) == sum(packet.lengths) + sum(packet.finished), "a wrong number of log-probs"
    for length, finished in zip(packet.lengths, packet.finished, strict=True):
        pieces = sizes[:length]
        sizes = sizes[length:]
        whole = sum(pieces)
        assert length + finished <= run.completion_tokens, "too long"
        assert all(pieces[:-1]), "an empty piece"
        assert sum(pieces[:-1]) < run.completion_bytes, "it goes on after the cap in bytes"
        if finished:
            assert all(pieces), "an empty piece before an end"
            assert whole < run.completion_bytes, "finished after the cap in bytes"
        else:
            full = length == run.completion_tokens or whole >= run.completion_bytes
            assert full or pieces[-1] == 0, "cut short"


def _check_tokens(run: Run, packet: Packet, data: bytes):
    """Of answers of one turn or of several; those of a run without turns have no given ids."""
    if run.packet == 3:
        *_, turns, runs, records, given = msgpack.unpackb(data)
    else:
        turns = [0] * len(packet.lengths)
        runs = given = b""
        records = data[len(data) - 8 * sum(packet.lengths) :]
    pairs = list(struct.iter_unpack("<II", runs))
    tokens = list(struct.iter_unpack("<If", records))
    lowest = -(math.log(run.vocabulary) + 18)
    assert all(id < run.vocabulary for (id,) in struct.iter_unpack("<I", given)), "a given id is no token"
    assert len(given) == 4 * sum(more for _, more in pairs), "given ids of no run"
    assert all(id < run.vocabulary for id, _ in tokens), "an id is outside the vocabulary"
    assert all(lowest <= claim <= LOGPROB_MAX for _, claim in tokens), "an impossible log-prob"
    for length, finished, count in zip(packet.lengths, packet.finished, turns, strict=True):
        own = pairs[:count]
        pairs = pairs[count:]
        ids = [id for id, _ in tokens[:length]]
        tokens = tokens[length:]
        whole = length + sum(more for _, more in own)
        assert count < run.turns and 1 <= whole <= run.completion_tokens, "too long, or empty"
        assert finished or whole == run.completion_tokens, "cut short"
        assert all(some and more for some, more in own), "an empty run"
        for some, _ in own:
            _check_ends(run, ids[:some], True)
            ids = ids[some:]
        _check_ends(run, ids, finished)


def _check_ends(run: Run, ids: Sequence[int], finished: bool):
    """That an answer ends in an EOS if it is finished, and has none before."""
    assert ids, "an answer of nothing"
    *before, last = [id in run.eos for id in ids]
    assert not any(before) and last == finished, "the EOS rule is broken"


# --- announcements ----------------------------------------------------------------------------------------------------


def read_announcement(data: bytes):
    """The parser, and a node that hears it from a peer."""
    signed = False
    try:
        announcement = decode_announcement(data, max_packets=RUN.slots)
    except Malformed as error:
        assert str(error).isprintable(), "an error does not print"
    else:
        assert announcement.encode() == data, "an announcement has two spellings"
        assert len(announcement.signed_bytes()) == 93 + 42 * len(announcement.packets), "what is signed is ambiguous"
        signed = announcement.verify()
    with stopped_clock():
        gossip = messages.listener()
        told = ftis_pb2.Entry(announcement=data)
        gossip.answer(ftis_pb2.ExchangeRequest(entries=[told]), PEERS[2].author)
    assert gossip.counts.total() == 1, "it was not counted once"
    assert len(gossip.table) == gossip.counts["new"] <= signed, "what nobody signed is in the table"


# --- records of the DHT -----------------------------------------------------------------------------------------------


def store_record(data: bytes):
    """A store request of hivemind's DHT, as the DHT handles it: whatever it keeps, its owner has signed.

    hivemind answers any exception of a handler with an error, so any but running out of memory is a refusal.
    """
    try:
        request = dht_pb2.StoreRequest.FromString(data)
    except DecodeError:
        return
    request.ClearField("peer")  # whom to ping, over a network
    dht = GuardedDht(_initialized_with_create=True)
    dht.storage = DHTLocalStorage()
    dht.cache = DHTLocalStorage()
    dht.node_info = dht_pb2.NodeInfo()
    context = SimpleNamespace(remote_id=PeerID(_caller(request)), handle_name="DHTProtocol.rpc_store")
    validator = OwnerSigned(OWN, RUN.id)
    dht.shelf = shelf = Shelf(validator, lambda peer: False)
    with stopped_clock():
        try:
            run_async(dht.rpc_store(request, context))
        except MemoryError:
            raise
        except Exception:
            pass
        assert not dht.storage and not dht.cache, "hivemind kept something"
        for key in set(request.keys):
            for record in shelf.records(key):
                _check_record(validator, record)


def _caller(request: dht_pb2.StoreRequest) -> bytes:
    """Whoever the first record is said to be of, for only its own are kept; else somebody."""
    try:
        return author_of(str(msgpack.unpackb(request.subkeys[0])))
    except Exception:
        return AUTHOR.author


def _check_record(validator: OwnerSigned, record: DHTRecord):
    assert NOW - 60 < record.expiration_time <= NOW + MAX_LIFETIME, "a record lives too long"
    owner = author_of(msgpack.unpackb(record.subkey))
    value = record.value[:-64]
    signature = record.value[-64:]
    packed = struct.pack(">d", record.expiration_time)
    message = b"".join((b"ftis/record/1", record.key, record.subkey, packed, value))
    assert verify(owner, message, signature), "its owner did not sign it"
    addresses = validator.addresses(record, owner)
    assert len(addresses) <= 8, "too many addresses"
    for address in addresses:
        assert len(address) <= 256, "an address is long"
        assert address.endswith(peer_id(owner)), "an address of somebody else"


# --- texts ------------------------------------------------------------------------------------------------------------


def read_run_file(data: bytes):
    """A run file that somebody sent."""
    text = data.decode("utf-8", "ignore")
    try:
        run_file = run_file_from_json(text)
    except UsageError as error:
        assert str(error).isprintable(), "an error does not print"
        return
    assert len(run_file.run.id) == 16, "a run has an id"
    again = run_file_as_json(run_file)
    assert len(again) <= RUN_FILE_CHARACTERS_MAX, "nobody else can read this run file once it is passed on"
    assert run_file_from_json(again) == run_file, "a run file does not read back"


def read_address(data: bytes):
    """An address of a peer that somebody mentioned."""
    text = data.decode("utf-8", "ignore")
    try:
        peer = parse_address(text)
    except UsageError as error:
        assert str(error).isprintable(), "an error does not print"
        return
    assert text.endswith(f"/p2p/{peer_id(peer)}"), "it is not the address of that peer"
    assert ranked([text]) == [text], "an address gets lost in ranking"


TARGETS = {
    "admit": Target(admit_packet, packed.packet, seeds.packets, 1 << 13),
    "announcement": Target(read_announcement, packed.announcement, seeds.announcements, 1 << 10),
    "handshake": Target(messages.shake_hands, mutators.frames(messages.HANDSHAKES), seeds.handshakes, 1 << 13),
    "exchange": Target(messages.exchange, mutators.frames(messages.EXCHANGES), seeds.conversations, 1 << 13),
    "serve": Target(messages.serve, mutators.frames(messages.REQUESTS), seeds.requests, 1 << 12),
    "fetch": Target(messages.fetch_packets, mutators.frames(messages.CHUNKS), seeds.streams, 1 << 13),
    "record": Target(store_record, mutators.record, seeds.dht_records, 1 << 14),
    "run_file": Target(read_run_file, mutators.run_file, seeds.run_files, RUN_FILE_CHARACTERS_MAX + 1024),
    "address": Target(read_address, mutators.address, seeds.addresses, 512),
    "certificate": Target(records.read_record, records.change_record, records.record_seeds, 1 << 12),
    "invitation": Target(records.read_invitation, records.change_invitation, records.invitation_seeds, 1 << 12),
    "mdns": Target(records.read_mdns, packed.repacked(packed.changed), records.mdns_seeds, 1 << 12),
    "gguf": Target(records.read_gguf, raw, records.gguf_seeds, 1 << 13),
    "jail": Target(records.read_from_jail, mutators.reply, records.jail_seeds, 1 << 16),
}
