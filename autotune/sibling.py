"""One of the further workers of a command with `probe.parallel`, as a program: see siblings.py."""

from __future__ import annotations

import pickle
import signal
import sys
import traceback

from autotune import credentials
from autotune.errors import AutotuneError
from autotune.tune import tune


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Be one of a command's further workers, to its end."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        settings, place = pickle.load(sys.stdin.buffer)  # of the command that started this process
        credentials.remember(settings.study.store)
        tune(settings, place)
    except AutotuneError as error:
        print(credentials.masked(error.message), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - the process's edge: no traceback with a password in it
        print(credentials.masked(traceback.format_exc()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
