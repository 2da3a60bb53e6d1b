"""How commands reach a running node: they ask its local API (`observe.web`), and link to its page."""

import http.client
import json
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from ftis_node.errors import UsageError, UserError
from ftis_node.observe.answers import Kind, read

LOOK_INTO_LOG = "Look into node.log in its home."
TOKEN_BYTES = 32


class NoDaemon(UserError):
    """Nobody answers where a daemon should."""

    def __init__(self) -> None:
        super().__init__("No ftis-node daemon is running on this home.", "Start one with `ftis-node join`.")


def no_page(host: str, port: int, error: OSError) -> UserError:
    """The error of a node or of the doctor where the page cannot be served."""
    return UserError(
        f"The page cannot be served at {host} port {port}: {error.strerror or error}.",
        "Name another port with --set http_port=PORT (0: any), or do without it with --set page=false.",
    )


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(
    path: Path | None,
    route: str,
    kind: type[Kind],
    *,
    timeout: float = 5.0,
    order: Mapping[str, str] | None = None,
) -> Kind:
    """Return a running daemon's answer.

    Args:
        path: its API socket, None if it left no record of one.
        kind: what the answer is read as, see `observe.answers`; `dict` leaves it as it is.
        order: what an order is sent with; None: it is a question.

    Raises:
        NoDaemon: nobody answers there, or not in JSON.
        UserError: the daemon does not answer in time, not this, or not what `kind` needs.
        UsageError: it refuses the order.
    """
    if path is None:
        raise NoDaemon
    connection = UnixConnection(path, timeout)
    try:
        if order is None:
            connection.request("GET", route)
        else:
            connection.request("POST", route, json.dumps(order))
        response = connection.getresponse()
        body = response.read()
        if response.status == http.HTTPStatus.UNPROCESSABLE_ENTITY:
            refusal = json.loads(body)
            raise UsageError(refusal["what"], refusal["fix"])
        if response.status != http.HTTPStatus.OK:
            raise UserError(f"The daemon answered {route} with {response.status} {response.reason}.", LOOK_INTO_LOG)
        return read(json.loads(body), kind)
    except TimeoutError as error:
        raise UserError(f"The daemon on this home did not answer within {timeout:g} s.", LOOK_INTO_LOG) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoDaemon from error
    finally:
        connection.close()


def read_token(path: Path) -> str:
    """The token of a home, made at its first use, in a file that only its owner can read.

    Raises:
        OSError: the file can be neither read nor written.
    """
    try:
        kept = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        kept = ""
    if len(kept) >= TOKEN_BYTES:
        path.chmod(0o600)
        return kept
    token = secrets.token_urlsafe(TOKEN_BYTES)
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    path.write_text(f"{token}\n", encoding="ascii")
    return token


def link(address: str, token: str) -> str:
    """The address with the token in it, which a browser exchanges for a cookie."""
    return f"{address}?{urlencode({'token': token})}"
