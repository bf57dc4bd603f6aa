"""A database's password is nobody's business: not the process list's, no log's, no error's, no child's.

Whoever writes a password into an argument has it moved to AUTOTUNE_STORE at once, by starting the program anew
without it. Whatever is printed of errors and settings has passwords masked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus, urlsplit

from autotune.errors import SettingsError

VARIABLE = "AUTOTUNE_STORE"
_MOVED = "AUTOTUNE_STORE_MOVED"
"""Set beside it where the program has moved it there: the argument as others may read it."""

_SECRET_VARIABLES = (VARIABLE, _MOVED, "PGPASSWORD")
_MASK = "***"
_USER_INFO = re.compile(r"(://[^\s:/@?#'\"]*:)[^\s'\"]*(?=@)")
_QUERY = re.compile(r"((?:^|[?&\s])(?:ssl)?password=)[^\s&'\"]+", re.IGNORECASE)
_OVERRIDE = re.compile(r"\+{0,2}study\.store=")
_known: set[str] = set()
moved = [os.environ[_MOVED]] if _MOVED in os.environ else []
"""What was left out of the arguments, masked, for hints that repeat them."""


def passwords(url: str) -> set[str]:
    """The passwords in a database's URL, as they are written there and as they are meant."""
    written = {match[0][len(match[1]) :] for match in _USER_INFO.finditer(url)}
    written |= {match[0][len(match[1]) :] for match in _QUERY.finditer(url)}
    try:
        parts = urlsplit(url)
        written |= {parts.password} if parts.password else set()
        written |= {value for name, value in parse_qsl(parts.query) if name.lower() in ("password", "sslpassword")}
    except ValueError:  # no URL, or one that cannot be read
        pass
    meant = {decode(secret) for secret in written for decode in (unquote, unquote_plus)}
    return {form for secret in meant for form in (secret, quote(secret, safe=""), quote_plus(secret))} | written


def remember(url: str | None) -> None:
    """Mask the passwords of this URL wherever `masked` meets them, whatever stands around them."""
    _known.update(secret for secret in passwords(url or "") if secret and secret != _MASK)


def masked(text: str) -> str:
    """A text as others may read it."""
    text = _QUERY.sub(rf"\1{_MASK}", _USER_INFO.sub(rf"\1{_MASK}", text))
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that have no business with the database."""
    return {name: value for name, value in environ.items() if name not in _SECRET_VARIABLES}


def withdraw() -> None:
    """Take the store out of this process's environment, so that no child inherits it; it has been read."""
    for name in (VARIABLE, _MOVED):
        os.environ.pop(name, None)


def hide(arguments: Sequence[str]) -> None:
    """Start this program anew with the password in the environment, where an argument holds one.

    Raises:
        SettingsError: it stands where it cannot be moved from.
    """
    remember(os.environ.get(VARIABLE))
    if not any(passwords(argument) for argument in arguments):
        return
    for argument in arguments:
        remember(argument)
    url, kept, told = _parted(arguments)
    if url is None or any(passwords(argument) for argument in kept):
        raise SettingsError(
            "a password in an argument is seen by everybody who lists the processes",
            f"put the whole URL into the environment variable {VARIABLE} and leave it out here",
        )
    _start_anew(kept, {**os.environ, VARIABLE: url, _MOVED: told})


def _parted(arguments: Sequence[str]) -> tuple[str | None, list[str], str]:
    """(the last URL with a password, the other arguments, its argument as others may read it)."""
    url, kept, told = None, [], ""
    words = iter(arguments)
    for word in words:
        name, value = word, None
        if word == "--store":
            name, value = "--store=", next(words, "")
        elif word.startswith("--store="):
            name, value = "--store=", word.removeprefix("--store=")
        elif found := _OVERRIDE.match(word):
            name, value = found[0], _unquoted(word[found.end() :])
        if value is None:
            kept.append(word)
        else:
            url, told = value, masked(name + value)
    return url, kept, told


def _unquoted(value: str) -> str:
    """A value without the quotes that Hydra asks for around a `=`."""
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("\\" + value[0], value[0])
    return value


def _start_anew(arguments: list[str], environ: dict[str, str]) -> NoReturn:
    head = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    os.execve(sys.executable, [*head, *arguments], environ)
