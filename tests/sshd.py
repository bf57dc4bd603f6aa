"""A real sshd on the loopback, in a folder of its own: its own host key, its own list of authorised keys."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.commands import MARK, wait_for
from tests.slurm import free_ports

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
SetEnv {variable}={mark}
"""
CLIENT = """
Host first
  HostName 127.0.0.1
Host second
  HostName 127.0.0.2
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""


@dataclass
class Sshd:
    """A running sshd.

    Attributes:
        config: of a client that knows two hosts here, `first` and `second`; for ssh -F.
        folder: where its files are.
        mark: of every process that is started over it (commands.py).
    """

    folder: Path
    config: Path
    mark: str
    process: subprocess.Popen[bytes]

    def connections(self) -> list[psutil.Process]:
        """The processes that serve a connection each."""
        return psutil.Process(self.process.pid).children()


@contextlib.contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    """An sshd that answers."""
    for key in ("host_key", "key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (port,) = free_ports(1)
    mark = uuid.uuid4().hex
    (folder / "sshd_config").write_text(CONFIG.format(port=port, folder=folder, variable=MARK, mark=mark))
    client = folder / "ssh_config"
    client.write_text(CLIENT.format(port=port, user=getpass.getuser(), folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd confines its unprivileged part; its package makes it at boot
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        wait_for(lambda: "Server listening on 127.0.0.2" in (folder / "sshd.log").read_text(), 10)
        yield Sshd(folder, client, mark, process)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        process.wait(10)
