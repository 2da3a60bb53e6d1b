"""What is taken out of a text before it leaves this machine: secrets, addresses, the way to a person's home."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path

REMOVED = "[removed]"

# Forms of secrets, wherever they stand.
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bsk-[\w-]{16,}|\bAKIA[A-Z0-9]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_IN_A_URL = re.compile(r"(?<=://)[^/\s@\"']+(?=@)")
# NAME=value, "name": "value", Authorization: Bearer value. `tokens`, of which logs are full, are no secret.
_NAMED = re.compile(
    r"(?i)(\b[\w-]*(?:password|passwd|secret|credential|api[_-]?key|private[_-]?key|token)(?:[\"']?\s*[:=]\s*[\"']?))"
    r"[^\s\"',;&}]+"
)
_BEARER = re.compile(
    r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}|(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)[^\"'\n;,}]+"
)
_PEER = re.compile(r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
_NAME = re.compile(r"(?<=/)(dns|dns4|dns6|dnsaddr|ip4|ip6)/([^/\s\"',]+)")
_IP4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")


class Redactor:
    """Cleans texts. The same address gets the same name in all reports of one home, and nobody can guess it back."""

    def __init__(self, key: bytes | None, secrets: Iterable[str] = (), *, with_addresses: bool = False) -> None:
        """
        Args:
            key: what names of addresses are made with; None: with something random.
            secrets: texts that are removed wherever they stand.
        """
        self._key = hashlib.sha256(b"ftis-node bugreport" + (key or os.urandom(32))).digest()
        self._secrets = sorted((one for one in secrets if len(one) >= 6), key=len, reverse=True)
        self._with_addresses = with_addresses
        self._home = str(Path.home())

    def clean(self, text: str) -> str:
        """The text without what should not leave this machine."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        text = _SECRETS.sub(REMOVED, text)
        text = _IN_A_URL.sub(REMOVED, text)
        text = _BEARER.sub(lambda found: f"{found[1] or found[2]}{REMOVED}", text)
        text = _NAMED.sub(rf"\1{REMOVED}", text)
        if not self._with_addresses:
            text = _PEER.sub(lambda found: self._named("peer", found[0]), text)
            text = _NAME.sub(lambda found: f"{found[1]}/{self._place(found[2])}", text)
            text = _IP4.sub(lambda found: self._place(found[0]), text)
            text = _IP6.sub(
                lambda found: self._place(found[0]) if "::" in found[0] or _full(found[0]) else found[0], text
            )
        return re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text) if len(self._home) > 1 else text

    def _place(self, text: str) -> str:
        """The name of an address; those of this machine alone, which say nothing, stay."""
        try:
            place = ipaddress.ip_address(text)
        except ValueError:
            known = text.startswith("addr-") or re.fullmatch(r"[\d.:]+", text)
            return text if known else self._named("addr", text)  # a name, or a version such as 1.2.3.400
        return text if place.is_loopback or place.is_unspecified else self._named("addr", str(place))

    def _named(self, kind: str, text: str) -> str:
        return f"{kind}-{hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:12]}"


def _full(text: str) -> bool:
    return text.count(":") == 7
