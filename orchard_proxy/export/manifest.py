"""`orchard.json` and the dataset card: what an export says about itself, beside its Parquet files.

The manifest names every file with its digest, so that a copy can be checked; the card is what Hugging Face
`datasets` reads to find one config per table.
"""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import msgspec

from orchard_proxy.errors import ExportError
from orchard_proxy.schema.columns import SCHEMA_VERSION, TABLES
from orchard_proxy.schema.records import Accounting, JournalDamage

NAME = "orchard.json"
CARD = "README.md"
FORMAT = "orchard-export"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an export. `table` and `rows` are null for files that hold no rows."""

    path: str
    bytes: int
    sha256: str
    table: str | None = None
    rows: int | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows by table, and how many of the rollouts were still running."""

    rollouts: int
    calls: int
    samples: int
    running_rollouts: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `orchard.json`."""

    format: str = FORMAT
    schema_version: tuple[int, int] = SCHEMA_VERSION
    producer: str
    created_at: str
    """UTC, ISO 8601."""
    counts: Counts
    accounting: Accounting
    invariant: str
    """The accounting as the one line that every export prints."""
    journal_damages: list[JournalDamage] = []
    """What of the recording was lost: the calls that may miss some of it carry the problem `journal_damaged`."""
    files: list[FileEntry]

    def footer(self, table: str) -> dict[str, str]:
        """Return the `orchard.*` keys that the footer of each Parquet file of `table` must hold."""
        return footer(table, self.accounting, self.producer, self.schema_version)


def footer(
    table: str, accounting: Accounting, producer: str, schema_version: tuple[int, int] = SCHEMA_VERSION
) -> dict[str, str]:
    """Return the footer keys of a file; the accounting is that of the whole export."""
    return {
        "orchard.schema_version": ".".join(map(str, schema_version)),
        "orchard.producer": producer,
        "orchard.table": table,
        "orchard.accounting": msgspec.json.encode(accounting, order="deterministic").decode(),
    }


def damage_lines(damages: Iterable[JournalDamage]) -> list[str]:
    """Return one line for each damaged segment."""
    segments: dict[str, list[JournalDamage]] = {}
    for damage in damages:
        segments.setdefault(damage.segment, []).append(damage)
    return [_damage_line(segment, found) for segment, found in segments.items()]


def _damage_line(segment: str, found: list[JournalDamage]) -> str:
    lost, places = sum(damage.bytes for damage in found), len(found)
    where = "in one place" if places == 1 else f"in {places} places"
    return (
        f"warning: journal segment {segment} is damaged {where}: {lost} bytes lost, first at offset {found[0].offset}. "
        "What was recorded there is missing; calls that may have lost a part carry the problem journal_damaged."
    )


def producer() -> str:
    """Return what writes exports: this package and its version."""
    return f"orchard-proxy {version('orchard-proxy')}"


def read(folder: Path) -> Manifest:
    """Read the manifest of an export. Raise ExportError when it is none, or one that we are too old for."""
    path = folder / NAME
    if not path.is_file():
        raise ExportError(f"{folder} is not an Orchard export: it has no {NAME}. Make one with `orchard export`.")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise ExportError(f"{path} cannot be read ({error}); export again with --overwrite.") from error
    if manifest.format != FORMAT:
        raise ExportError(f"{path} says that its format is {manifest.format!r}, not {FORMAT!r}.")
    refuse_newer(manifest.schema_version, str(path))
    return manifest


def refuse_newer(schema_version: tuple[int, int], where: str) -> None:
    """Raise ExportError when a file's major version is newer than ours."""
    if schema_version[0] > SCHEMA_VERSION[0]:
        theirs, ours = (".".join(map(str, one)) for one in (schema_version, SCHEMA_VERSION))
        raise ExportError(
            f"{where} has schema {theirs}, this Orchard reads {ours}; upgrade: pip install -U orchard-proxy."
        )


def encode(manifest: Manifest) -> bytes:
    """Render the manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def card(counts: Counts, accounting: Accounting) -> str:
    """Render the dataset card: a config per table, `samples` by default."""
    configs = "".join(_config(table) for table in TABLES)
    rows = "\n".join(f"| {table} | {getattr(counts, table)} |" for table in TABLES)
    return f"---\nconfigs:\n{configs}tags:\n- orchard\n---\n{_CARD_TEXT.format(line=accounting.line(), rows=rows)}"


def _config(table: str) -> str:
    default = "  default: true\n" if table == "samples" else ""
    return f"- config_name: {table}\n{default}  data_files:\n  - split: train\n    path: {table}/*.parquet\n"


_CARD_TEXT = """
# Orchard export

{line}

| table | rows |
|---|---|
{rows}

- `samples`: one training row each: `token_ids`, `loss_mask` (1 = a target) and `logprobs` (NaN where the mask is 0),
  all of one length. Each sampled token is a target in at most one sample.
- `calls`: every model request and its answer. A prompt is stored as the first `prompt_shared` tokens of an earlier
  call (`prompt_base_call_id`) and the new ids.
- `rollouts`: one attempt at one task, with its reward.

`orchard validate` checks it; `orchard.json` lists every file with its sha256.
"""
