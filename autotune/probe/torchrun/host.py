"""The warm launcher's long-lived process: the elastic agent in its main thread, a fork server below it.

Requests and replies are JSON lines over two inherited pipes (stdout belongs to the libraries):
`{"spec": path}` runs one probe, `{"describe": path}` looks at the workload's model; the first reply is `{"ready"}`.
It dies with the controller (leash.py), and everything that it started dies with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import IO, Any

from autotune.probe.torchrun import describe, preload
from autotune.probe.torchrun.agent import launch


def main() -> None:
    """Serve requests until the controller closes its end."""
    requests: IO[str] = os.fdopen(int(sys.argv[1]), "r")
    replies: IO[str] = os.fdopen(int(sys.argv[2]), "w")

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    os.environ[preload.FORK_SERVER] = "1"
    multiprocessing.set_forkserver_preload([preload.__name__])
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    reply({"ready": first.exitcode == 0})
    for line in requests:
        request = json.loads(line)
        if "describe" in request:
            process = context.Process(target=describe.main, args=(request["describe"],))
            process.start()
            process.join()
            reply({"exit_codes": {0: process.exitcode}, "error": None})
        else:
            reply(launch(request["spec"], "forkserver"))


def _nothing() -> None:
    """The first rank: its end says that the fork server has imported everything."""


if __name__ == "__main__":
    main()
