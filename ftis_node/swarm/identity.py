"""A node's identity: one Ed25519 key gives its libp2p identity, its author id and its signatures.

The peer id of an Ed25519 key *contains* the public key, so a signature proves its author to anyone, relayed or not. The
file is what p2pd reads: libp2p's PrivateKey protobuf, key type 1, data = 32-byte seed ‖ 32-byte public key
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md). The four bytes before the data are written by hand,
because importing hivemind's protobuf takes two seconds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ftis_node.errors import UsageError, UserError
from ftis_node.host.files import sync

OfPeer = Callable[[bytes], bool]
"""A question about a peer or an author, by its 38 bytes."""

AUTHOR_BYTES = 38
SIGNATURE_BYTES = 64

_PRIVATE_KEY_HEADER = bytes.fromhex("08011240")  # field 1: Ed25519; field 2: 64 bytes follow
_AUTHOR_HEADER = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: the same fields, 32 bytes follow
_PEER_ID_CHARACTERS = 52

# The y-coordinates of the points whose order divides 8, as a key may spell them (RFC 8032, 5.1.3; _P + 1 is 1). Without
# a private key of it, anybody can sign some messages for such a key.
_P = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _ORDER_8, _P - _ORDER_8, _P - 1, _P, _P + 1}


class Identity:
    """A private key and what follows from it. Its text form shows the peer id only, so it may be logged."""

    __slots__ = ("_key", "_seed", "author")

    author: bytes
    """The peer id, 38 bytes: 00 24 08 01 12 20 ‖ public key."""

    def __init__(self, seed: bytes) -> None:
        """`seed` is the 32 random bytes of the key. Raises ValueError if it is not 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.author = _AUTHOR_HEADER + self._key.public_key().public_bytes_raw()

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in the file; create the file if there is none. Raises UserError.

        An existing file is never overwritten, and a new one appears whole or not at all.
        """
        try:
            return cls(os.urandom(32)).keep(path)
        except OSError as error:
            raise UserError(f"The key file {path} cannot be used: {error.strerror}.", "Name another --home.") from error

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity in the file; never create one.

        Raises:
            UsageError: there is no such file.
            UserError: the file is damaged or unreadable.
        """
        if not path.exists():
            raise UsageError(f"The home {path.parent} has no key yet.", "Name the --home of a node that was started.")
        return cls.load_or_create(path)

    def keep(self, path: Path) -> Identity:
        """Write this key into a file unless the file exists; return the identity that the file then holds, which may be
        another. Two processes that do so at once get the same.

        Raises:
            OSError: the file cannot be read or written.
            UserError: the existing file is damaged.
        """
        if not path.exists():
            _write_new(path, self.to_bytes())
        try:
            return self.from_bytes(path.read_bytes())
        except ValueError as error:
            raise UserError(
                f"The key file {path} is damaged: {error}.",
                "Put your copy of the key in its place; or remove it, and the home takes a new one.",
            ) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Read libp2p's PrivateKey protobuf. Raises ValueError, saying why, if it is not a whole Ed25519 key."""
        if len(data) != 68 or not data.startswith(_PRIVATE_KEY_HEADER):
            raise ValueError("it is not a libp2p Ed25519 private key of 68 bytes")
        identity = cls(data[4:36])
        if identity.to_bytes() != data:
            raise ValueError("its public half does not belong to its private half")
        return identity

    def to_bytes(self) -> bytes:
        """libp2p's PrivateKey protobuf, 68 bytes. Secret."""
        return _PRIVATE_KEY_HEADER + self._seed + self.author[len(_AUTHOR_HEADER) :]

    @property
    def peer_id(self) -> str:
        """The author id in base58, as libp2p writes it: 52 characters from ``12D3KooW``."""
        return peer_id(self.author)

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature (RFC 8032), 64 bytes."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def is_author(author: bytes) -> bool:
    """Whether these bytes have the form of an Ed25519 peer id, whose key is no point of small order."""
    if len(author) != AUTHOR_BYTES or not author.startswith(_AUTHOR_HEADER):
        return False
    y = int.from_bytes(author[len(_AUTHOR_HEADER) :], "little") % 2**255  # the last bit is the sign of x
    return y not in _SMALL_ORDER


def verify(author: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `author` (a 38-byte peer id) signed `message`. False for anything malformed; never raises."""
    if not is_author(author) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(author[len(_AUTHOR_HEADER) :]).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id(author: bytes) -> str:
    """The 38-byte peer id in base58, the text that people see; `author_of` reads it."""
    return base58.b58encode(author).decode()


def author_of(peer_id: str) -> bytes:
    """The 38 bytes of a base58 peer id. Raises ValueError if it is not an Ed25519 peer id."""
    # base58 decodes in quadratic time, so check the length first. This also allows only one spelling: every Ed25519
    # peer id has 52 characters, and the count includes white space that the decoder would strip.
    author = b""
    if len(peer_id) == _PEER_ID_CHARACTERS:
        author = base58.b58decode(peer_id)
    if not is_author(author):
        raise ValueError("not an Ed25519 peer id (52 characters from 12D3KooW)")
    return author


def _write_new(path: Path, data: bytes) -> None:
    """Write a file with mode 0600 that is whole or absent after a crash, unless one is there already. It is on the disk
    when this returns. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike rename, it fails if another process was faster; then the other key stays
        except FileExistsError:
            return
    finally:
        os.unlink(temporary)
    sync(path.parent)
