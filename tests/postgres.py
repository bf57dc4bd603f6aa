"""A private PostgreSQL server from Debian's package: up in seconds, gone with the session, restarted in mid-test."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psycopg

PASSWORD = "pencil"


def binaries() -> Path:
    """Where initdb and postgres are: Debian keeps them out of the PATH."""
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert places, "PostgreSQL's server is not installed: `make test` installs it (apt-get install postgresql)"
    return places[-1]


class Server:
    """One server on a free port of the loopback, as a user other than root: root is refused by it."""

    def __init__(self) -> None:
        self._bin = binaries()
        root = os.geteuid() == 0
        self._user = next((u for u in pwd.getpwall() if u.pw_name == "postgres"), None) if root else None
        assert self._user or not root, "there is no user `postgres` to run the server as"
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
        if self._user:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._data = self._folder / "data"
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run("initdb", "-D", self._data, "-U", "tuner", "-A", "scram-sha-256", "--pwfile", secret, "--no-sync")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        # A crash of the server is survived without fsync: only one of the whole machine is not.
        options = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self._data), *words], stdout=log, stderr=log, **self._as_user()
        )
        log.close()
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                said = (self._folder / "log").read_text(errors="replace")
                assert self._process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.05)

    def stop(self, mode: str = "fast") -> None:
        """End the server: `fast` rolls back what is open, `immediate` is a crash."""
        if self._process is not None and self._process.poll() is None:
            self._run("pg_ctl", "stop", "-D", self._data, "-m", mode)
            self._process.wait(30)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def close(self) -> None:
        try:
            self.stop("immediate")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"studies_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)

    def dsn(self, database: str) -> str:
        return f"postgresql://tuner:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: object) -> None:
        words = [str(self._bin / program), *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, **self._as_user())
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, object]:
        more = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []} if self._user else {}
        return {"stdin": subprocess.DEVNULL, "cwd": "/", **more}
