"""The benchmarks still run. What they measure is for people to read, never for a test to judge."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_proxys_cost_prints_a_row_for_every_size():
    command = [sys.executable, str(HERE / "proxy_cost.py"), "--calls", "2", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    assert rows == [[size, kind] for size in ("64", "8k", "32k") for kind in ("whole", "stream")]
