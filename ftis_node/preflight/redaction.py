"""Removes secrets, addresses and the path of the person's home from texts that leave this machine."""

import hashlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Iterable

REMOVED = "[removed]"

# Texts may be JSON, or JSON within JSON. Quotes come with backslashes before them, and line breaks as \n, whose letter
# is no part of the word that follows. Texts may also be hostile: every pattern takes time linear in the text's length.
# So each repetition is possessive, has a limit, or cannot begin within itself. Groups are never
# possessive: Python before 3.11.5 takes a character too many after them (python/cpython#106052).
_ESCAPED = r"(?<=\\[nrt])|(?<=\\u[0-9A-Fa-f]{4})"
_BEGIN = rf"(?:(?<![A-Za-z0-9_])|{_ESCAPED})"
_BREAK = r"(?:\s|\\{1,8}[nrt]){0,40}"
_QUOTE = r"\\*+[\"']?"

# Forms of secrets, wherever they stand: after what begins a word.
_FORMS = re.sub(
    r"\s+",
    "|",
    r"""hf_[A-Za-z0-9]{8,} gh[pousr]_[A-Za-z0-9]{16,} github_pat_\w{16,} gl(?:[dfpr]t|pat|rtr|ptt|soat)-[\w.-]{16,}
    sk-[\w-]{16,} [prs]k_(?:live|test)_\w{8,} xox[a-z][.-][\w.-]{8,} (?:nvapi|xai|xapp|pypi|tskey|GOCSPX)-[\w-]{16,}
    (?:gsk|npm|r8|rpa|whsec|api_org|do[opr]_v1|wandb_v\d)_\w{16,} (?:AKIA|ASIA)[A-Z0-9]{12,} AIza[\w-]{30,}
    (?:ya29|SG|hv[bs])\.[\w.-]{16,} AGE-SECRET-KEY-1[A-Z0-9]{16,} ftis:[\w-]{16,} \d{8,12}:AA[\w-]{30,} dapi[0-9a-f]{32}
    (?:en|wl)x[0-9a-f]{12} (?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|webhook\.office\.com)/[\w/@.-]++
    (?:ssh-\w{3,9}|ecdsa-sha2-[\w-]{1,20}|sk-[\w@.-]{1,40})\x20AAAA[\w+/=]++(?:\x20[\w.@-]++)?""",
)
_SECRETS = re.compile(
    rf"{_BEGIN}(?:{_FORMS})|(?:(?<![\w-])|(?<=\\[nrt]))eyJ[\w-]{{8,}}+\.[\w-]++\.[\w-]*+"
    # Only the lines of a PEM key that look like one: its first line in a log must not hide the rest of the log.
    rf"|-----BEGIN [A-Z ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----"
    rf"(?:{_BREAK}(?:Proc-Type|DEK-Info|Version|Comment): [^\n\\]{{1,100}})*(?:{_BREAK}[A-Za-z0-9+/=]{{16,}}+)*"
    rf"(?:{_BREAK}[A-Za-z0-9+/=]{{0,76}}+{_BREAK}-----END [A-Z ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----)?"
    # Hardware addresses; the end of an IPv6 address is none.
    rf"|(?:(?<![\w:.-])|{_ESCAPED}|(?<=[Mm][Aa][Cc][:=])|(?<=[g-zG-Z][:=]))"
    r"(?:[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}|[0-9A-Fa-f]{4}(?:\.[0-9A-Fa-f]{4}){2})(?![\w:]|[.-]\w)"
)
# Keys of W&B and others, which nothing marks as such. Packets have 64 digits.
_KEY = re.compile(rf"(?:{_BEGIN}|(?<=_))(?:[0-9A-Fa-f]{{40}}|[0-9A-Fa-f]{{32}})(?![A-Za-z0-9])")
_MAIL = re.compile(
    rf"(?:(?<![\w\\])|{_ESCAPED})[\w.+-]{{1,64}}+(?:@|%40)(?:[\w-]{{1,63}}+\.){{1,8}}[A-Za-z]{{2,24}}(?![\w@])"
)
_URL = re.compile(r"://[^\s\"'<>]++")
# NAME=value, "name": "value", Authorization: Bearer value. Anything may stand before or after it in the name. `tokens`,
# `tokenizer` and `token_ids`, of which logs are full, are no secret. A quoted value goes up to the same quote.
_NAMED = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|secret|credential|(?:api|private|access)[_-]?key|token(?!s|iz|[_-]?id))"
    rf"[\w-]{{0,40}}+{_QUOTE}[ \t]*+[:=][ \t]*+)"
    r"(?:(?P<quote>\\*+[\"'])(?:(?!(?<!\\)(?P=quote))[^\n])*|(?:[^\s\"',;&}\\]|\\(?!\\{0,8}[\"']))+)"
)
_BEARER = re.compile(
    rf"(?i)({_BEGIN}(?:bearer|basic)\s++)[\w.~+/=-]{{8,}}"
    rf"|({_BEGIN}(?:proxy-)?authorization{_QUOTE}\s*+[:=]\s*+{_QUOTE})[^\"'\n;,}}\\]++"
)
_PEER = re.compile(rf"{_BEGIN}12D3KooW[1-9A-HJ-NP-Za-km-z]{{44}}\b")
_NAME = re.compile(r"(?<=/)(dns|dns4|dns6|dnsaddr|ip4|ip6)/([^/\s\"',\\]+)")
_IP4 = re.compile(r"(?:(?<![\w.])|(?<=\\[nrt]))\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?:(?<![\w:.])|(?<=\\[nrt]))[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
# A name with a port; FILE.py:12 is a place in the code.
_HOST = re.compile(
    r"(?i)(?:(?<![a-z0-9.-])|(?<=\\[nrt]))(?:[a-z0-9-]{1,63}+\.){1,10}"
    r"(?!(?:py|pyi|toml|jsonl?|log|md|txt|so|c|cc|cpp|h|rs|go|sh):)[a-z]{2,24}+(?=:\d{1,5}(?!\d))"
)


class Redactor:
    """Cleans texts. The same address gets the same name in all reports of one home, and nobody can guess it back."""

    def __init__(
        self, key: bytes | None, secrets: Iterable[str] = (), public: str = "", *, with_addresses: bool = False
    ) -> None:
        """
        Args:
            key: what names of addresses are made with; None: with something random.
            secrets: texts that are removed wherever they stand.
            public: numbers in it of 32 or 40 hex digits are no keys.
        """
        self._key = hashlib.sha256(b"ftis-node bugreport" + (key or os.urandom(32))).digest()
        known = {form for one in secrets if len(one) >= 6 for form in _spellings(one)}
        self._secrets = sorted(known, key=len, reverse=True)
        self._public = set(_KEY.findall(public))
        self._with_addresses = with_addresses
        own = os.path.expanduser("~")  # itself, where there is no home folder
        homes = "|".join(map(re.escape, _spellings(own)))
        self._home = re.compile(r"(?!)")  # which is nowhere
        if len(own) > 1:
            self._home = re.compile(rf"(?:{homes})(?![\w.-])")

    def clean(self, text: str) -> str:
        """Return the text without secrets, addresses (unless they are wanted) and the path of the person's home."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        text = _SECRETS.sub(REMOVED, text)
        text = _KEY.sub(self._key_or_public, text)
        text = _MAIL.sub(REMOVED, _URL.sub(_without_credentials, text))
        text = _BEARER.sub(lambda found: f"{found[1] or found[2]}{REMOVED}", text)
        text = _NAMED.sub(lambda found: f"{found[1]}{found['quote'] or ''}{REMOVED}", text)
        if not self._with_addresses:
            text = _PEER.sub(lambda found: self._named("peer", found[0]), text)
            text = _NAME.sub(lambda found: f"{found[1]}/{self._place(found[2])}", text)
            text = _IP4.sub(lambda found: self._place(found[0]), text)
            text = _IP6.sub(self._ip6, text)
            text = _HOST.sub(lambda found: self._named("addr", found[0].lower()), text)
        return self._home.sub("~", text)

    def _key_or_public(self, found: re.Match[str]) -> str:
        if found[0] in self._public:
            return found[0]
        return REMOVED

    def _ip6(self, found: re.Match[str]) -> str:
        if "::" in found[0] or found[0].count(":") == 7:
            return self._place(found[0])
        return found[0]

    def _place(self, text: str) -> str:
        """The name of an address; those of this machine alone, which say nothing, stay."""
        try:
            place = ipaddress.ip_address(text)
        except ValueError:
            if text.startswith("addr-") or re.fullmatch(r"[\d.:]+", text):  # a name, or a version such as 1.2.3.400
                return text
            return self._named("addr", text)
        if place.is_loopback or place.is_unspecified:
            return text
        return self._named("addr", str(place))

    def _named(self, kind: str, text: str) -> str:
        return f"{kind}-{hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()[:12]}"


def _spellings(text: str) -> list[str]:
    """A text as it is, in JSON, and in JSON within JSON; the longest first."""
    within = json.dumps(text)[1:-1]
    return sorted({text, within, json.dumps(within)[1:-1]}, key=len, reverse=True)


def _without_credentials(found: re.Match[str]) -> str:
    """Remove everything up to the last @: a password may hold @ and slashes."""
    _, at, rest = found[0].rpartition("@")
    if not at:
        return found[0]
    return f"://{REMOVED}@{rest}"
