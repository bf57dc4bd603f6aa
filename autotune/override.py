"""Overrides on the command line: how they are put to Hydra, and what its errors about them mean to people."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.errors import OverrideParseException

from autotune.errors import SettingsError

OPEN = ("model.config", "model.args", "workload.optimizer.params", "machine.peak_tflops")
"""Mappings whose names are not ours to know."""
HELP = "run `python -m autotune --help` for the groups and sections, `--cfg job --resolve` for every setting"


def put(overrides: Iterable[str]) -> list[str]:
    """The overrides in words that Hydra takes as they are meant.

    A knob's list or mapping replaces what conf/ says, where Hydra would merge the two or refuse to. Names may be added
    to open mappings without Hydra's `+`. OmegaConf cannot merge a mapping into a section that is null
    (workload.scheduler), but it can with the section around it.
    """
    return [word for override in overrides for word in _words(override)]


def _words(override: str) -> Iterator[str]:
    key, equals, value = override.partition("=")
    bracketed = value.lstrip().startswith(("{", "["))
    path = key.split(".")
    if equals and path[:2] == ["workload", "scheduler"] and (bracketed or len(path) > 2):
        inner = "".join(f"{{{name}:" for name in path[1:])
        yield f"++workload={inner}{value}{'}' * (len(path) - 1)}"
    elif equals and key.startswith(OPEN):
        yield f"++{override}"
    else:
        if bracketed and len(path) == 2 and path[0] == "space":
            yield f"{key}=null"
        yield override


def names(kind: type[Any], prefix: str = "") -> list[str]:
    """Every setting of a dataclass by its dotted name, sections included."""
    found = []
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        found.append(name)
        if isinstance(section := types[field.name], type) and dataclasses.is_dataclass(section):
            found += names(section, f"{name}.")
    return found


def strangers(section: object, prefix: str = "") -> list[str]:
    """Dotted names in composed settings that are no settings: `+name=value` adds them past the schema."""
    known = {field.name for field in dataclasses.fields(section)} if dataclasses.is_dataclass(section) else set()
    found = []
    for name, value in vars(section).items():
        if name not in known:
            found.append(prefix + name)
        elif dataclasses.is_dataclass(value):
            found += strangers(value, f"{prefix}{name}.")
    return found


def no_setting(name: str, known: Sequence[str]) -> SettingsError:
    """The error for a setting that there is none of, with those that have names like it."""
    elsewhere = [setting for setting in known if setting.rpartition(".")[2] == name]
    alike = elsewhere or get_close_matches(name, known, n=3, cutoff=0.7)
    meant = f"did you mean {' or '.join(alike)}? " if alike else ""
    return SettingsError(f"there is no setting {name}", meant + HELP)


def composition_error(error: Exception, known: Sequence[str]) -> SettingsError:
    """The sentence and the hint for one of Hydra's or OmegaConf's errors; one of ours in its chain speaks for itself.

    Args:
        error: what was raised.
        known: every setting by its dotted name.
    """
    within: BaseException | None = error
    while within is not None:
        if isinstance(within, SettingsError):
            return SettingsError(within.message, within.hint)
        within = within.__cause__ or within.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = lines[0].rstrip(".")
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, first)
    if found := re.match(r"Could not override '([^']+)'", first):
        return no_setting(found[1], known)
    if found := re.match(r"Error merging override (.*)", first):
        return SettingsError(
            f"{found[1]} cannot be: {_reason(error)}", "`--cfg job --resolve` shows every setting and its value"
        )
    if found := re.search(r"Could not (?:find|load) '(\w+)/(.+)'", first):
        options = [line for line in lines[2:] if "=" not in line and not line.startswith("Config search path")]
        hint = f"one of {', '.join(options)}" if options else "name one of the files of that folder in conf/"
        return SettingsError(f"there is no {found[1]}={found[2]}", hint)
    return SettingsError(first, HELP)


def _unreadable(override: str, why: str) -> SettingsError:
    if "://" in override:  # not repeated: it may hold a password
        return SettingsError(
            "a database URL with '=' in it must be quoted for Hydra",
            """write 'study.store="postgresql://host/db?sslmode=require"' with both quotes, or set AUTOTUNE_STORE""",
        )
    why = why.removeprefix(f"Error parsing override '{override}'").strip() or "it has no ="
    return SettingsError(
        f"the override {override} cannot be read: {why}",
        """it has the form SECTION.KEY=VALUE; quote a value with = or spaces in it twice: 'study.name="a = b"'""",
    )


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error.__context__ or error
    line = str(cause).strip().splitlines()[0]
    return line[:1].lower() + line[1:]
