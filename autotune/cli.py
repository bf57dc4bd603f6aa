"""The verbs; a bare list of Hydra overrides means `tune`."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autotune import __version__, credentials
from autotune.errors import AutotuneError, SettingsError
from autotune.usage import usage

if TYPE_CHECKING:
    from autotune.settings import Settings
    from autotune.store.store import Store

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code.

    0 a winner (or a listing), 1 unexpected, 2 usage or settings, 3 nothing feasible, 4 infrastructure, 5 store,
    130 interrupted. Errors are one sentence and a hint on stderr; `--debug` adds the traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    credentials.remember(os.environ.get(credentials.VARIABLE))
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show × still gets its figures
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _interrupt)  # a batch system's end of time is an interruption like Ctrl-C
    try:
        if arguments is None:
            credentials.hide(given)
        verb, rest = _verb(given)
        if verb != "tune":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `autotune trials … | head` ends quietly
        return VERBS[verb](rest)
    except AutotuneError as error:
        if debug:
            _trace()
        _say(f"error: {error.message}", error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            _trace()
        again = shlex.join(["python", "-m", "autotune", *given])
        sweep = not given or given[0] not in VERBS or given[0] == "tune"
        store = f", with {credentials.VARIABLE} as the URL that was given here," * bool(credentials.moved)
        _say("interrupted", f"everything measured is saved; `{again}`{store} goes on where this stopped" * sweep)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the process's edge: what nobody expected is told in a sentence
        if debug:
            _trace()
        _say(f"error: {type(error).__name__}: {error}", "this is unexpected: run it again with --debug to see where")
        return 1


def _verb(given: list[str]) -> tuple[str, list[str]]:
    """The verb of a command line, and what follows it.

    Raises:
        SettingsError: it begins with a word that is neither a verb nor an override.
    """
    first = given[0] if given else ""
    if first in VERBS:
        return first, given[1:]
    if first.isidentifier():
        alike = get_close_matches(first, VERBS, n=1)
        meant = f"did you mean {alike[0]}? " if alike else ""
        raise SettingsError(f"there is no verb {first}", f"{meant}there are {', '.join(VERBS)}")
    return "tune", given


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _trace() -> None:
    print(credentials.masked(traceback.format_exc()), end="", file=sys.stderr)


def _say(sentence: str, hint: str) -> None:
    """Say what is wrong and what to do; a password in a URL is nobody's business."""
    sentence, hint = credentials.masked(sentence), credentials.masked(hint)
    print(sentence, file=sys.stderr)
    if hint:
        first, *more = hint.splitlines()
        print(f"hint: {first}", *more, sep="\n      ", file=sys.stderr)


# -- tune ---------------------------------------------------------------------------------------------------------


def _tune(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print(usage())
        return 0
    if "--version" in arguments:
        print(f"autotune {__version__}")
        return 0
    sweeps = _composed(arguments)
    credentials.withdraw()
    if sweeps:
        from autotune.tune import tune

        for settings in sweeps:
            tune(settings)
    return 0


def _composed(arguments: list[str]) -> list[Settings]:
    """The settings of the sweeps that a command line asks for.

    None where one of Hydra's flags (--cfg, --info) only shows something, several under --multirun. The sweeps
    themselves run outside of Hydra, which would print every override of one that fails, a database's password too.

    Raises:
        SettingsError: Hydra refuses a flag or an override, or a value cannot mean anything.
    """
    import hydra

    from autotune.override import put
    from autotune.settings import config_dir, from_config, register_schema, settings_errors

    register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself, with 1
    composed: list[Any] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def application(config: Any) -> None:
        composed.append(config)

    said, shown = io.StringIO(), io.StringIO()
    program, sys.argv = sys.argv, ["autotune", *put(arguments)]
    pipe = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a sweep outlives who reads its output, a listing does not
    try:
        with settings_errors(), redirect_stderr(said), redirect_stdout(shown):
            application()
    except SystemExit as end:  # of Hydra's argument parser, after its usage and `autotune: error: …`
        if end.code:
            reason = said.getvalue().strip().rpartition("error: ")[2]
            raise SettingsError(reason, "`python -m autotune --help` shows what there is") from end
    else:
        sys.stderr.write(credentials.masked(said.getvalue()))
    finally:
        sys.stdout.write(credentials.masked(shown.getvalue()))
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, pipe)
        sys.argv = program
    return [from_config(config) for config in composed]


# -- the reading verbs --------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise SettingsError(message, f"`{self.prog} --help` shows what it takes")


def _parser(verb: str, about: str, *, store: bool = True, listing: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"autotune {verb}", description=about)
    if store:
        parser.add_argument(
            "--store", metavar="URL", help="SQLAlchemy URL (default: AUTOTUNE_STORE, else the settings')"
        )
    if listing:
        parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    return parser


def _store(url: str | None) -> Store:
    from autotune.settings import compose_settings, environment_store, normalise_store
    from autotune.store.store import Store

    url = url or environment_store()
    return Store.open(normalise_store(url) if url else compose_settings([]).store_url, create=False)


def _studies(arguments: list[str]) -> int:
    from autotune.report.listing import list_studies

    options = _parser("studies", "List the studies of a store.").parse_args(arguments)
    list_studies(_store(options.store), options.format, sys.stdout)
    return 0


def _trials(arguments: list[str]) -> int:
    from autotune.report.listing import list_trials

    parser = _parser("trials", "List every probe of a study: measured, inferred, reused and confirmed.")
    parser.add_argument("study", metavar="STUDY")
    options = parser.parse_args(arguments)
    list_trials(_store(options.store), options.study, options.format, sys.stdout)
    return 0


def _compare(arguments: list[str]) -> int:
    from autotune.report.compare import compare_studies

    parser = _parser("compare", "Compare the winners of studies, with what differs between them and their machines.")
    parser.add_argument("studies", metavar="STUDY", nargs="+")
    options = parser.parse_intermixed_args(arguments)
    compare_studies(_store(options.store), options.studies, options.format, sys.stdout)
    return 0


def _export(arguments: list[str]) -> int:
    from autotune.export.deepspeed import write_winner
    from autotune.store.records import winner_of

    parser = _parser(
        "export", "Write deepspeed_config.json and recipe.json of a winner, or of any trial.", listing=False
    )
    parser.add_argument("study", metavar="STUDY")
    parser.add_argument("--trial", type=int, metavar="N", help="this trial instead of the winner")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: studies/STUDY)")
    parser.add_argument("--nvme-path", metavar="DIR", help="for a candidate that offloads to nvme")
    options = parser.parse_args(arguments)
    store = _store(options.store)
    study, probes = store.study(options.study), store.probes(options.study)
    if options.trial is None:
        record = winner_of(study, probes)
        if record is None:
            raise SettingsError(
                f"study {study.name} has no winner yet",
                f"let its sweep finish, or name a trial of `trials {study.name}`",
            )
    else:
        record = next((probe for probe in probes if probe.trial == options.trial), None)
        if record is None:
            raise SettingsError(
                f"study {study.name} has no trial {options.trial}", f"`autotune trials {study.name}` lists them"
            )
    out = options.out or Path("studies") / study.name
    for path in write_winner(record, study.workload, study.machine, out, options.nvme_path):
        print(path)
    return 0


def _check(arguments: list[str]) -> int:
    from autotune.check import check
    from autotune.settings import compose_settings

    parser = _parser(
        "check",
        "Name every rule that a DeepSpeed config breaks: what DeepSpeed would ignore or change without a word first, "
        "then what it would refuse. With model=…, predict the memory that it takes (csv has the rules alone); what no "
        "config can say is taken from space.checkpoint_blocks=… and the like. Exit code 2 when a rule is broken, 3 "
        "when it does not fit.",
        store=False,
    )
    parser.add_argument("config", metavar="CONFIG.json", type=Path)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="OVERRIDE", help="e.g. machine=a100_80g model=llama3_8b"
    )
    options = parser.parse_intermixed_args(arguments)
    predict = any(override.startswith("model=") for override in options.overrides)
    return check(options.config, compose_settings(options.overrides), predict, options.format, sys.stdout)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "tune": _tune,
    "studies": _studies,
    "trials": _trials,
    "export": _export,
    "compare": _compare,
    "check": _check,
}
