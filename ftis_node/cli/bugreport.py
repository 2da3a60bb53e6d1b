"""``ftis-node bugreport``."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, print_json, say_finding, waiting
from ftis_node.cli.flags import Given, with_settings
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError, brief, one_by_one
from ftis_node.node.options import JoinOptions
from ftis_node.preflight.bugreport import collect, pack
from ftis_node.preflight.case import Case, Finding, case_of
from ftis_node.preflight.checks import examined
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import say


@with_settings("model")
def bugreport(
    *,
    home: HomeOption = DEFAULT_HOME,
    out: Annotated[Path | None, typer.Option(help="The file to write, .tar.gz; default: one in this folder.")] = None,
    given: Given,
    with_addresses: Annotated[bool, typer.Option("--with-addresses", help="Leave addresses and ids.")] = False,
    json: JsonOption = False,
) -> None:
    """Pack what helps to find a mistake into one file; send nothing.

    Versions, the doctor's findings, settings, the run, status and peers, the last MB of the log and of the metrics,
    what checkpoints say of themselves. Never keys, tokens, weights or packets.
    """
    to = out or Path(time.strftime("ftis-node-bugreport-%Y%m%d-%H%M%S.tar.gz"))
    if to.exists() or not os.access(to.parent, os.W_OK):
        raise UsageError(f"{to} exists already, or cannot be written.", "Name another file with --out.")
    case, unsound = _case(home, given)
    with waiting("Checking this machine, its home and its network"):
        findings = [*unsound, *examined(case)]
        parts = collect(case, findings, with_addresses=with_addresses)
        pack(parts, to)
    for finding in findings:
        say_finding(finding, error=True)
    if json:
        print_json({"file": str(to), "packed": {name: len(text.encode()) for name, text in parts.items()}})
        return
    say(f"{to} holds:")
    for name, text in parts.items():
        say(f"  {name:18} {len(text.encode()):9,} bytes")
    hidden = ""
    if not with_addresses:
        hidden = " Addresses and peer ids are replaced by names that only this home can make."
    say(f"Nothing was sent.{hidden} Look through it before you send it: tar -xzf {to}")


def _case(home: Path, given: Given) -> tuple[Case, list[Finding]]:
    """The case with the person's settings, or with default ones and a finding where those cannot be read."""
    place = Home(home)
    options = JoinOptions(place)
    try:
        return case_of(options, given.on(place)), []
    except UserError as error:
        unsound = [Finding("settings", "fail", one.what, one.fix) for one in one_by_one(error)]
    except OSError as error:  # the home cannot be looked into
        unsound = [Finding("home", "fail", f"It cannot be read: {brief(error)}.", "")]
    defaults = Settings()
    return case_of(options, lambda _: (defaults, dict.fromkeys(Settings.model_fields, "default"))), unsound
