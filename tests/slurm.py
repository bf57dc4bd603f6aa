"""A real Slurm of a few nodes on this machine, in a folder of its own: up in seconds, gone at the end.

It is made of Debian's packages (munge, slurmctld, slurmd), needs root, and neither systemd nor control groups. Nothing
outside of its folder is written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.commands import wait_for

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=4
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 RealMemory=4000
PartitionName=p Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass
class Slurm:
    """A running Slurm.

    Attributes:
        config: what SLURM_CONF must name.
    """

    config: Path

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which this Slurm is the one that commands talk to, outside of any allocation."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])  # where Debian keeps the daemons
        return {**kept, "PATH": path, "SLURM_CONF": str(self.config)}

    def ask(self, *command: str) -> str:
        """What a command of Slurm's answers."""
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True, timeout=30).stdout

    def allocate(self, nodes: str) -> str:
        """An allocation of these nodes, running."""
        size = len(nodes.split(","))
        held = ("--ntasks-per-node=1", "--no-requeue", "--output=/dev/null", "--wrap", "exec sleep infinity")
        job = self.ask("sbatch", "--parsable", f"--nodes={size}", f"--nodelist={nodes}", *held).strip()
        wait_for(lambda: "RUNNING" in self.ask("squeue", "--noheader", "--format=%T", f"--jobs={job}"))
        return job

    def steps(self, name: str = "autotune-probe") -> list[str]:
        """The running steps of that name."""
        lines = self.ask("squeue", "--steps", "--noheader", "--format=%i %j").splitlines()
        return [line.split()[0] for line in lines if line.split()[1] == name]


@contextlib.contextmanager
def running_slurm(nodes: int) -> Iterator[Slurm]:
    """A Slurm whose nodes are idle, in a folder that munge takes: everyone may look into it."""
    with tempfile.TemporaryDirectory(prefix="autotune-slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with _running(Path(folder), nodes) as slurm:
            yield slurm


@contextlib.contextmanager
def _running(folder: Path, nodes: int) -> Iterator[Slurm]:
    (folder / "munge").mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(256))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    controller, *ports = free_ports(nodes + 1)
    config = folder / "slurm.conf"
    listed = ",".join(map(str, ports))
    config.write_text(CONFIG.format(folder=folder, host=host, controller=controller, ports=listed, nodes=nodes))
    slurm = Slurm(config)
    munge = [f"--{name}={folder}/munge/{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file")]
    commands = [["munged", "--foreground", f"--key-file={key}", f"--seed-file={folder}/munge/seed", *munge]]
    commands += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{number}"] for number in range(1, nodes + 1))]
    daemons = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon{number}.log").open("wb") as log:
                daemons.append(
                    subprocess.Popen(
                        command, env=slurm.environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder
                    )
                )
            if number == 0:
                wait_for((folder / "munge" / "socket").exists)
        wait_for(lambda: f"idle {nodes}" in _sinfo(slurm))
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in _left(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _sinfo(slurm: Slurm) -> str:
    command = ["sinfo", "--noheader", "--format=%T %D"]
    return subprocess.run(command, env=slurm.environ, capture_output=True, text=True, check=False).stdout


def _left(folder: Path) -> list[psutil.Process]:
    """The slurmstepd's of this Slurm, which outlive their slurmd and are nobody's children, and what they run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "slurmstepd" in " ".join(process.cmdline()) and Path(process.cwd()) == folder:
                found += [*process.children(recursive=True), process]
    return found
