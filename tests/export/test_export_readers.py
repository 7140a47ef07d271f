"""The readers that people use: datasets, DuckDB, polars, pandas. All see the same rows and the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from export_kit import varied

from orchard_proxy.export.writer import write
from orchard_proxy.schema.columns import TABLES

COUNTS = {"rollouts": 3, "calls": 12, "samples": 8}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "out"
    write(varied(), folder)
    write([], folder.with_name("empty"))
    return folder


@pytest.fixture(scope="module")
def tokens(out: Path) -> list[list[int]]:
    return [np.frombuffer(sample.token_ids, np.int32).tolist() for item in varied() for sample in item.samples]


def by_duckdb(path: Path) -> tuple[int, list[list[int]] | None]:
    with duckdb.connect() as db:
        (count,) = db.execute(f"select count(*) from '{path}/*.parquet'").fetchone() or (-1,)
        if path.name != "samples":
            return count, None
        return count, [row[0] for row in db.execute(f"select token_ids from '{path}/*.parquet'").fetchall()]


def by_polars(path: Path) -> tuple[int, list[list[int]] | None]:
    frame = pl.read_parquet(path / "*.parquet")
    return frame.height, frame["token_ids"].to_list() if path.name == "samples" else None


def by_pandas(path: Path) -> tuple[int, list[list[int]] | None]:
    frame = pd.read_parquet(path)
    return len(frame), [ids.tolist() for ids in frame["token_ids"]] if path.name == "samples" else None


def by_pyarrow(path: Path) -> tuple[int, list[list[int]] | None]:
    table = pq.read_table(path)
    return table.num_rows, table["token_ids"].to_pylist() if path.name == "samples" else None


READERS = [by_duckdb, by_polars, by_pandas, by_pyarrow]


@pytest.mark.parametrize("reader", READERS, ids=[reader.__name__ for reader in READERS])
@pytest.mark.parametrize("table", TABLES)
def test_every_reader_sees_the_same(
    reader: Callable[[Path], tuple[int, list[list[int]] | None]], table: str, out: Path, tokens: list[list[int]]
) -> None:
    count, ids = reader(out / table)
    assert count == COUNTS[table]
    assert ids is None or ids == tokens


@pytest.mark.parametrize("reader", READERS, ids=[reader.__name__ for reader in READERS])
@pytest.mark.parametrize("table", TABLES)
def test_every_reader_opens_an_empty_export(
    reader: Callable[[Path], tuple[int, list[list[int]] | None]], table: str, out: Path
) -> None:
    count, _ = reader(out.with_name("empty") / table)
    assert count == 0


LOAD = """
import json, sys
import datasets
datasets.disable_progress_bars()
out = sys.argv[1]
said = {name: len(datasets.load_dataset(out, name, split="train")) for name in ("rollouts", "calls", "samples")}
samples = datasets.load_dataset(out, split="train")
said["default"] = samples.column_names[:1]
said["tokens"] = samples["token_ids"][:]
said["type"] = str(samples.features["token_ids"])
streamed = datasets.load_dataset(out, "samples", split="train", streaming=True)
said["streamed"] = [row["token_ids"] for row in streamed]
said["configs"] = sorted(datasets.get_dataset_config_names(out))
print(json.dumps(said))
"""


# datasets refuses any split without rows ("corresponds to no data"); streaming takes it.
LOAD_EMPTY = """
import json, sys
import datasets
streamed = datasets.load_dataset(sys.argv[1], "samples", split="train", streaming=True)
print(json.dumps({"rows": len(list(streamed)), "columns": streamed.column_names}))
"""


def load(script: str, out: Path, cache: Path) -> dict[str, Any]:
    # A process of its own: datasets reads these variables once, when it is imported.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cache)}
    command = [sys.executable, "-c", script, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_datasets_loads_every_config_offline(out: Path, tokens: list[list[int]], tmp_path: Path) -> None:
    said = load(LOAD, out, tmp_path)
    assert {table: said[table] for table in TABLES} == COUNTS
    assert said["default"] == ["sample_id"]
    assert said["tokens"] == said["streamed"] == tokens
    assert "int32" in said["type"]
    assert said["configs"] == ["calls", "rollouts", "samples"]


def test_datasets_streams_an_empty_export(out: Path, tmp_path: Path) -> None:
    said = load(LOAD_EMPTY, out.with_name("empty"), tmp_path)
    assert said["rows"] == 0
