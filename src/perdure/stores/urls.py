"""URLs of stores on servers: find mistakes in them, and show them without passwords.

A URL with a mistake is not shown as it is, because the mistake may be in the password. In `redis://:top/secret@host`
the slash ends the host, so that `top` is read as a port and the rest as a path. Messages about mistakes quote no part
of the URL. This module knows no store and no driver.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
ENCODE = "write special characters of user and password as %XX (@ as %40, : as %3A, / as %2F, ? as %3F, # as %23)"
# Options whose values are shown. Others may be secrets, or parts of a password that has an ampersand.
_SHOWN_OPTIONS = (
    *("schema", "connections", "statement_cache_size", "listen", "timeout", "prefix", "durability", "partitions"),
    *("synchronous", "host", "port", "user", "username", "db", "database", "dbname", "sslmode", "application_name"),
    *("target_session_attrs", "socket_timeout", "socket_connect_timeout", "client_name", "max_connections"),
)
_SECRET_OPTION = re.compile(r"pass|pwd|secret|token|key|auth", re.IGNORECASE)
_SECRET_ASSIGNMENT = re.compile(rf"[?&][^=&]*({_SECRET_OPTION.pattern})[^=&]*=", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=.*", re.DOTALL)
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::(\d*))?")
MAX_PORT = 65_535


def find_mistake(url: str) -> str | None:
    """Return what is wrong with the URL of a server, without any part of the URL; None if nothing is."""
    if not url.isprintable() or " " in url:
        return f"Invalid URL: it has blanks or control characters; {ENCODE}"
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may quote the URL
        return f"Invalid URL; {ENCODE}"
    if "#" in url:
        return f"Invalid URL: it has a #; {ENCODE}"
    for host in parts.netloc.rpartition("@")[2].split(","):
        found = _HOST.fullmatch(host)
        if found is None or (found[1] and (len(found[1]) > 5 or int(found[1]) > MAX_PORT)):
            return f"Port must be a number up to {MAX_PORT}, after one host and one colon; {ENCODE}"
    if "@" in parts.path:
        return f"Invalid URL: it has an @ after the host; {ENCODE}"
    if any(item and not _OPTION.fullmatch(item) for item in parts.query.split("&")):
        return f"Invalid URL: after the ? there must be options, name=value, with & between them; {ENCODE}"
    return None


def redact_password(url: str) -> str:
    """Return the URL for messages and output, without anything that may be part of a password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    elif not _SCHEME.fullmatch(scheme):
        return f"{HIDDEN}://{HIDDEN}"
    if not any(mark in rest for mark in ":@?"):
        return url  # a file, or a server without a login
    if separator and find_mistake(url) is None:
        server, question, query = rest.partition("?")
        login, at, host = server.rpartition("@")
    else:
        # The last @ most likely ends the login. Without one, all that follows the user may be the password; and so may
        # all that follows an option that is one.
        login, at, end = rest.rpartition("@")
        if not at or _SECRET_ASSIGNMENT.search(login):
            return f"{scheme}{separator}{_user_of(rest)}:{HIDDEN}"
        host, question, query = end.partition("?")
    shown_query = "&".join(map(_redact_option, query.split("&"))) if query else ""
    password = f":{HIDDEN}" if ":" in login else ""
    return f"{scheme}{separator}{_user_of(login)}{password}{at}{host}{question}{shown_query}"


def without_secrets(message: str, url: str) -> str:
    """Return a driver's message about a URL, or a general one if the driver quotes a secret of the URL."""
    parts = urlsplit(url)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    options = [value for name, value in parse_qsl(parts.query) if _SECRET_OPTION.search(name)]
    secrets = (password, unquote(password), *options)
    return f"the driver refuses it; {ENCODE}" if any(secret and secret in message for secret in secrets) else message


def _user_of(login: str) -> str:
    return re.split(r"[:/?#@]", login, maxsplit=1)[0]


def _redact_option(item: str) -> str:
    name, equals, value = item.partition("=")
    if not equals or not name.isidentifier():
        return HIDDEN
    return item if name.lower() in _SHOWN_OPTIONS and "@" not in value else f"{name}={HIDDEN}"
