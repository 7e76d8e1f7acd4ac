"""JupyterLab as a user has it, but with folders of its own: no settings, extensions or runs of this machine's user."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

NEWS_OFF = {"fetchNews": "false", "checkForUpdates": False}
START_S = 90.0
END_S = 20.0


class Lab:
    """A JupyterLab server over the folder `root/work`, which holds a copy of one notebook."""

    def __init__(self, root: Path, notebook: Path) -> None:
        self.root, self.work = root, root / "work"
        self.work.mkdir(parents=True)
        shutil.copy(notebook, self.work)
        self.notebook = self.work / notebook.name
        self.token = secrets.token_hex(16)
        self.address = f"127.0.0.1:{_free_port()}"
        self._log = root / "lab.log"
        self._process = self._start()

    @property
    def page(self) -> str:
        """Where a browser finds the notebook."""
        return f"http://{self.address}/lab/tree/{self.notebook.name}?token={self.token}"

    def _start(self) -> "subprocess.Popen[bytes]":
        settings = self.root / "settings"
        news = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text(json.dumps(NEWS_OFF), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "JUPYTER"))}
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment |= {name: str(self.root / folder) for name, folder in folders.items()}
        port = self.address.rpartition(":")[2]
        command = [sys.executable, "-m", "jupyterlab", str(self.work), "--no-browser", "--allow-root"]
        command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
        command += [f"--IdentityProvider.token={self.token}"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, cwd=self.work, env=environment, stdout=log, stderr=log)
        return process

    def wait_until_up(self) -> None:
        """Wait until the server answers. Raises AssertionError with its log when it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self.ask("status")
                return
            time.sleep(0.2)
        raise AssertionError(f"JupyterLab did not start:\n{self._log.read_text(encoding='utf-8')[-4000:]}")

    def ask(self, path: str, method: str = "GET") -> Any:
        """An answer of the server's REST API. Raises OSError."""
        request = urllib.request.Request(f"http://{self.address}/api/{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    @property
    def kernel(self) -> dict[str, Any]:
        """The notebook's kernel as the server describes it; {} while there is none.

        In the moment that a kernel starts the server knows no time of its last activity yet, and cannot list it.
        """
        try:
            kernels: list[dict[str, Any]] = self.ask("kernels")
        except urllib.error.HTTPError as error:
            if error.code != 500:
                raise
            return {}
        return kernels[0] if kernels else {}

    def close(self) -> list[int]:
        """End the server and its kernels. Returns the processes that had to be killed."""
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        with contextlib.suppress(OSError):
            self.ask("shutdown", "POST")
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            process.kill()
        return [process.pid for process in left]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
