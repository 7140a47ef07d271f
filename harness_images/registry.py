"""Find a harness by its name, or by the path of a folder that has a `harness.toml`."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from harness_images import manifest
from harness_images.harness import ManifestHarness
from orchard_proxy.schema.launch import HarnessError

MANIFEST = "harness.toml"
BUNDLED = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the bundled harnesses."""
    return sorted(path.parent.name.replace("_", "-") for path in BUNDLED.glob(f"*/{MANIFEST}"))


def find(name_or_path: str, args: Mapping[str, str] | None = None) -> ManifestHarness:
    """Return a harness: a bundled one by its name (`-` or `_`), else the one in a folder. Raises HarnessError.

    What holds a slash, or begins with a dot or a tilde, is a path.
    """
    folder = _folder(name_or_path)
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError("bad_manifest", f"Cannot read {path}: {error}.") from error
    return ManifestHarness(manifest.parse(text, where=str(path)), folder, args)


def _folder(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.startswith((".", "~")):
        return _given(Path(name_or_path).expanduser())
    name = name_or_path.strip().lower().replace("_", "-")
    if name in names():
        return BUNDLED / name.replace("-", "_")
    near = difflib.get_close_matches(name, names(), n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    own = f" The folder of that name is ./{name_or_path}." if Path(name_or_path, MANIFEST).is_file() else ""
    message = (
        f"There is no harness {name_or_path!r}.{guess}{own} There are {', '.join(names())}; a folder of your own with "
        f"a {MANIFEST} is given as ./FOLDER."
    )
    raise HarnessError("unknown_harness", message)


def _given(path: Path) -> Path:
    folder = path.parent if path.name == MANIFEST else path
    if not (folder / MANIFEST).is_file():
        raise HarnessError(
            "unknown_harness", f"{folder} has no {MANIFEST}; docs/harness-manifest.md says what it holds."
        )
    return folder.absolute()
