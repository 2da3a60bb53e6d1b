"""Signed messages, and reading what a stranger sent."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import msgspec

from ftis_node.errors import FtisError
from ftis_node.swarm.identity import Identity, verify

Kind = TypeVar("Kind")


class Malformed(FtisError):
    """Bytes that are no message of the kind that was expected, or a message that cannot be made."""


def decode(
    data: bytes,
    kind: type[Kind],
    most: int,
    what: str,
    hook: Callable[[type, Any], Any] | None = None,
) -> Kind:
    """Read msgpack of at most `most` bytes; signatures are not checked. Raises Malformed.

    Args:
        kind: the type to read.
        what: it is, in words, for the error.
        hook: makes the types that msgspec does not know.
    """
    if len(data) > most:
        raise Malformed(f"{what} has no more than {most} bytes")
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=hook)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is not {what}: {error}") from None


class Signed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """Fields with an Ed25519 signature, as an array without any others. run_id: 16 bytes.

    The order of the fields, and the name of a class, are signed: neither may change.
    """

    run_id: bytes
    signature: bytes = b""

    @classmethod
    def context(cls) -> bytes:
        """What is signed before the fields: it has the class's name, so no kind of message passes for another."""
        return f"ftis/{cls.__name__.lower()}/1".encode()

    @property
    def encoded(self) -> bytes:
        """Its bytes, as it is sent; they are computed at each call."""
        return msgspec.msgpack.encode(self)

    def signed_by(self, identity: Identity) -> Self:
        """The same with this identity's signature in place of any other."""
        return msgspec.structs.replace(self, signature=identity.sign(self._message()))

    def verify(self, signer: bytes) -> bool:
        """Whether the signature is that of `signer`, a 38-byte peer id. It takes about 0.1 ms, so strangers' ones are
        checked within a budget."""
        return verify(signer, self._message(), self.signature)

    def _message(self) -> bytes:
        """What is signed: the context, and the fields with an empty signature."""
        return self.context() + msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))
