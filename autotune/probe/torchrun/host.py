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
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import IO, Any

from autotune.probe.torchrun import describe, preload
from autotune.process import Identity, adopt_orphans, children, end_orphans


def main() -> None:
    """Serve requests until the controller closes its end."""
    requests: IO[str] = os.fdopen(int(sys.argv[1]), "r")
    replies: IO[str] = os.fdopen(int(sys.argv[2]), "w")

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    adopt_orphans()
    os.environ[preload.FORK_SERVER] = "1"
    multiprocessing.set_forkserver_preload([preload.__name__])
    forkserver.ensure_running()
    from autotune.probe.torchrun.agent import launch  # imports torch; so does the fork server meanwhile

    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    first = context.Process(target=_first_rank, args=(theirs,))
    first.start()
    theirs.close()
    try:
        server = Identity(*ours.recv())
    except EOFError:
        reply({"ready": False})
        return
    first.join()
    reply({"ready": True})
    for line in requests:
        request = json.loads(line)
        if "describe" in request:
            process = context.Process(target=describe.main, args=(request["describe"],))
            process.start()
            process.join()
            reply({"exit_codes": {0: process.exitcode}, "error": None})
        else:
            known = children()
            report = launch(request["spec"], "forkserver")
            end_orphans(known)
            reply(report if server.alive() else report | {"exit_codes": {}, "error": "the fork server died"})


def _first_rank(answer: Connection) -> None:
    """Tell which process the fork server is: it has imported everything by then."""
    server = Identity.of(os.getppid())
    assert server is not None
    answer.send((server.pid, server.started))


if __name__ == "__main__":
    main()
