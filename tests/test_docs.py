"""What the README and `--help` tell people to type is understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from autotune.cli import VERBS
from autotune.settings import compose_settings
from autotune.usage import usage

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = re.findall(r"^ +(?:\S*/)?python -m autotune (.*)$", f"{README}\n{usage()}", re.MULTILINE)
GIVEN = {
    *(tuple(shlex.split(command, comments=True)) for command in COMMANDS if "=" in command),
    *(tuple(shlex.split(code)) for code in re.findall(r"`([^`\n]+=[^`\n]+)`", README)),
}
OVERRIDES = sorted(
    words
    for given in GIVEN
    if (words := tuple(word for word in given if re.match(r"\+?[a-z_][\w.]*=", word)))
    and not any("…" in word or word.endswith("=") for word in given)
)


def test_the_readme_and_help_give_enough_examples() -> None:
    assert len(COMMANDS) > 10
    assert len(OVERRIDES) > 15


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_overrides_in_the_readme_and_help_are_understood(overrides: tuple[str, ...]) -> None:
    compose_settings(["machine=cpu", *overrides])


def test_verbs_in_the_readme_exist() -> None:
    told = {words.split()[0] for words in re.findall(r"python -m autotune ([a-z]+ .*)", README)}
    assert told
    assert told <= VERBS.keys()
