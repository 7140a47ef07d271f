"""Start the `orchard` command as a user would, and wait until it says on which port."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ORCHARD = [sys.executable, "-m", "orchard_proxy.cli.main"]


class Child:
    """One `orchard` process that writes a port file."""

    def __init__(self, verb: list[str], port_file: Path, log: Path) -> None:
        port_file.unlink(missing_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*ORCHARD, *verb, "--port-file", str(port_file)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        self._port_file = port_file
        self._log = log

    def wait_for_port(self, timeout_s: float = 30.0) -> int:
        until = time.monotonic() + timeout_s
        while not self._port_file.exists():
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < until, self._log.read_text()[-2000:]
            time.sleep(0.01)
        return int(self._port_file.read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 40.0) -> int:
        self.process.terminate()
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def orchard(*verb: str, folder: Path):
    """Run a verb with --port 0; give its URL; stop it at the end."""
    name = verb[0] + "-" + (verb[1] if len(verb) > 1 else "")
    child = Child([*verb, "--port", "0"], folder / f"{name}.port", folder / f"{name}.log")
    try:
        yield f"http://127.0.0.1:{child.wait_for_port()}"
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.stop()
        child.kill()


def run(*verb: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess:
    return subprocess.run([*ORCHARD, *verb], capture_output=True, text=True, timeout=timeout_s, check=False)


def pids_of(*words: str) -> list[int]:
    """Process ids whose command line holds all words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace").split("\0")
            if all(word in command for word in words):
                found.append(int(path.parent.name))
    return found


def kill_deriver(data_dir: Path) -> int:
    """Kill -9 every deriver of a data directory; say how many."""
    pids = pids_of("derive", "--follow", str(data_dir))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)
