"""launcher=hosts: the hosts of a DeepSpeed hostfile, one node program on each over ssh in batch mode."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InfraError, SettingsError
from autotune.probe.torchrun.remote.channel import Channel
from autotune.probe.torchrun.remote.launcher import NODE_PROGRAM, Loss
from autotune.probe.torchrun.remote.wire import Frame
from autotune.settings import Settings

_LINE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>[1-9]\d*)")
_CARRIED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HF_", "UCX_", "DS_", "CUDA_HOME", "LD_LIBRARY_PATH")
"""Variables of these names go along to the hosts, where ssh would leave them behind."""
_SSH_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 255, 126, 127


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a hostfile as DeepSpeed's launcher takes it: `host slots=8` a line, `#` begins a comment.

    Raises:
        SettingsError: it cannot be read, a line means nothing, a host comes twice, or hosts differ in their slots.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the hostfile {path} cannot be read: {error}", "launcher.hostfile=PATH names it") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise SettingsError(f"{path}, line {number}: '{text}' is no host", "write a line as `worker-1 slots=8`")
        host = Host(found["host"], int(found["slots"]))
        if host.name in {known.name for known in hosts}:
            raise SettingsError(f"{path}, line {number}: {host.name} is there already", "leave one of both lines out")
        if hosts and host.slots != hosts[0].slots:
            raise SettingsError(
                f"{path}, line {number}: {host.name} has {host.slots} slots, and {hosts[0].name} has {hosts[0].slots}",
                "a machine has equal nodes: write the same slots for each",
            )
        hosts.append(host)
    if not hosts:
        raise SettingsError(f"the hostfile {path} names no host", "write a line as `worker-1 slots=8` for each")
    return hosts


class SshHosts:
    """Starts node programs over ssh.

    Args:
        settings: launcher and machine.
    """

    name = "hosts"

    def __init__(self, settings: Settings) -> None:
        launcher = settings.launcher
        self._hosts = read_hostfile(Path(launcher.hostfile or ""))
        self._python = launcher.python or sys.executable
        self._ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
        # A host that has lost its power or its network says nothing: ssh gives up after three questions.
        self._ssh += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", *shlex.split(launcher.ssh_options)]

    def prepare(self) -> bool:
        """See Transport: hosts are there, or are not."""
        return False

    def variables(self) -> dict[str, str]:
        """See Transport."""
        return {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}

    def open(self, directory: Path, environ: dict[str, str]) -> list[Channel]:
        """See Transport."""
        if shutil.which("ssh") is None:
            raise InfraError("launcher=hosts, and there is no ssh here", "install an OpenSSH client")
        channels = []
        for node, host in enumerate(self._hosts):
            program = ["env", f"PYTHONPATH={environ['PYTHONPATH']}", self._python]
            program += ["-m", NODE_PROGRAM, str(node)]
            command = [*self._ssh, host.name, shlex.join(program)]
            channels.append(Channel.start(command, os.environ, [node], directory / f"agent{node}.log"))
        return channels

    def address(self, hello: Frame) -> str:
        """See Transport: the name or address that ssh itself would connect to, which a name in its config may hide."""
        first = self._hosts[0].name
        answer = subprocess.run([*self._ssh, "-G", first], capture_output=True, text=True, check=False)
        named = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
        return named.get("hostname", first)

    def loss(self, channel: Channel, elapsed_s: float) -> Loss:
        """See Transport."""
        host = self._hosts[channel.nodes[0]].name
        code = channel.process.returncode
        how = "the connection was lost" if code == _SSH_FAILED else f"its program ended with code {code}"
        return Loss(f"host {host} was lost: {how}")

    def refusal(self, channel: Channel) -> InfraError:
        """See Transport."""
        host = self._hosts[channel.nodes[0]].name
        code = channel.process.returncode
        if code == _SSH_FAILED:
            return InfraError(
                f"host {host} cannot be reached: {channel.last_line}",
                f"`ssh -o BatchMode=yes {host} true` must work here without a password; "
                "launcher.ssh_options takes a port or an identity file",
            )
        if code in (_NOT_FOUND, _NOT_EXECUTABLE):
            return InfraError(
                f"host {host} has no {self._python}",
                "install the same environment at the same place on every host, or name another with launcher.python",
            )
        return InfraError(
            f"the node program did not start on host {host} (exit code {code}): {channel.last_line}",
            f"autotune must be installed there for {self._python}, or launcher.python names another",
        )

    def close(self) -> None:
        """See Transport: nothing is kept."""
