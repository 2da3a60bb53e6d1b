"""A node's key is what libp2p takes it for, and its peer id proves who signed."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.errors import UserError
from ftis_node.swarm.identity import _SMALL_ORDER, Identity, author_of, is_author, peer_id, verify

VECTORS = json.loads((Path(__file__).parent.parent / "proto" / "vectors" / "identities.json").read_text())
SEEDS = st.binary(min_size=32, max_size=32)
SOUND = Identity(bytes(32)).peer_id


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_code_agrees_with_the_test_vectors(vector):
    identity = Identity(bytes.fromhex(vector["seed"]))
    assert identity.author.hex() == vector["author"]
    assert identity.peer_id == vector["peer_id"]
    assert is_author(identity.author)
    assert author_of(identity.peer_id) == identity.author
    assert identity.to_bytes().hex() == vector["key_file"]
    assert identity.sign(bytes.fromhex(vector["message"])).hex() == vector["signature"]


async def test_p2pd_takes_the_key_file_and_calls_itself_by_the_peer_id(tmp_path):
    from hivemind.p2p import P2P

    identity = Identity.load_or_create(tmp_path / "key")
    p2p = await P2P.create(identity_path=str(tmp_path / "key"), check_if_identity_free=False)
    try:
        assert p2p.peer_id.to_bytes() == identity.author
        assert p2p.peer_id.to_base58() == identity.peer_id
    finally:
        await p2p.shutdown()


def test_a_key_is_made_once_and_then_read(tmp_path):
    path = tmp_path / "home" / "identity.key"
    first = Identity.load_or_create(path).author
    assert Identity.load_or_create(path).author == first
    assert Identity.load_or_create(tmp_path / "b").author != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["identity.key"]


def test_all_who_make_the_key_at_once_get_the_same(tmp_path):
    found = []
    barrier = threading.Barrier(8)

    def make():
        barrier.wait()
        found.append(Identity.load_or_create(tmp_path / "key").author)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_damaged_key_is_told_and_left_alone(tmp_path):
    good = Identity(bytes(32)).to_bytes()
    path = tmp_path / "key"
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for damaged in [b"", good[:-1], good + b"\0", b"\x08\x00" + good[2:], *flipped]:
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged") as caught:
            Identity.load_or_create(path)
        assert "your copy" in caught.value.fix
        assert path.read_bytes() == damaged


def test_a_key_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file" / "key", tmp_path):
        with pytest.raises(UserError, match="cannot be used"):
            Identity.load_or_create(path)


def test_neither_text_nor_message_shows_the_secret():
    identity = Identity(b"secret secret secret secret 1234")
    assert repr(identity) == f"Identity({identity.peer_id})"
    assert "secret" not in str(identity)


@given(SEEDS, st.binary(max_size=100), st.binary(max_size=80), st.binary(max_size=80))
def test_a_signature_is_its_authors_for_one_message(seed, message, rubbish, more):
    identity = Identity(seed)
    other = Identity(bytes(31) + b"\x01")
    signature = identity.sign(message)
    assert verify(identity.author, message, signature)
    assert not verify(identity.author, message + b"x", signature)
    assert not verify(identity.author, message, bytes([signature[0] ^ 1]) + signature[1:])
    assert other.author == identity.author or not verify(other.author, message, signature)
    for author in (rubbish, bytes.fromhex("002408011220") + seed):  # any public key
        for foreign in (more, other.sign(b"another"), other.sign(more)[::-1]):
            assert verify(author, message, foreign) is False


def test_a_key_of_small_order_is_no_authors():
    for y in _SMALL_ORDER:
        keys = [(y + sign).to_bytes(32, "little") for sign in (0, 1 << 255)]
        authors = [bytes.fromhex("002408011220") + key for key in keys]
        assert not any(map(is_author, authors))
        for nobodys in map(peer_id, authors):
            with pytest.raises(ValueError):
                author_of(nobodys)
        # the neutral point and zero: right wherever the hash times the key is neutral
        signature = bytes([1]) + bytes(63)
        taken = [text for text in (bytes([number]) for number in range(99)) if _verifies(keys[0], text, signature)]
        assert taken or y >= 2**255 - 19, "without the check, whoever likes signs these"
        assert not any(verify(authors[0], text, signature) for text in taken)


def _verifies(key, message, signature):
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        peer_id(bytes(38)),
        *(SOUND[:-1] + last for last in ("", "0", "é", "\n")),
        SOUND + " ",
        " " + SOUND[:-1],
        "1" * 52,
        "z" * 52,
        "z" * 1_000_000,
    ],
    ids=lambda text: ascii(text[-12:]),
)
def test_what_is_no_ed25519_peer_id_is_a_value_error(text):
    with pytest.raises(ValueError):
        author_of(text)
