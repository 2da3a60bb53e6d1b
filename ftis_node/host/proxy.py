"""A proxy that the environment names and this machine cannot use."""

import importlib.util
from urllib.request import getproxies

from ftis_node.errors import UserError
from ftis_node.installed import to_install


def refused_proxy() -> UserError | None:
    """The error for a SOCKS proxy without the package that speaks to it; None where there is no such proxy.

    The hub's libraries hide this cause behind "no connection". The address stays untold: it may hold a password.
    """
    asked = ("https", "http", "all")
    named = next((scheme for scheme in asked if getproxies().get(scheme, "").startswith("socks")), None)
    if named is None or importlib.util.find_spec("socksio") is not None:
        return None
    return UserError(
        f"The variable {named}_proxy names a SOCKS proxy, and the package for it, socksio, is not installed.",
        f"Run: {to_install('socksio')}; or unset {named}_proxy and {named.upper()}_PROXY.",
    )
