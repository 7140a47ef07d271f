"""How root starts bubblewrap: with a real uid that is not root's, and with sources it could not reach itself. Pure.

A uid that is not root's cannot look into a 0700 home, where the interpreter or a proxy socket may be. So the launcher,
still root, takes a mount namespace of its own, binds each source to a staging folder there, and only then gives up its
uid. The staging mounts are seen by nobody else and vanish with the namespace.
"""

import shlex
from collections.abc import Sequence

STAGE = "/run/orchard/stage"
ROOT = f"{STAGE}/root"
OTHERS = 0x70020000
"""Owners other than root of what is in a rootfs appear from here on: they are nobody's, like the rest of this range."""

_SCRIPT = r"""
umask 022
mount -t tmpfs -o mode=0755,size=1m,nosuid,nodev orchard-stage "$STAGE"
while [ "$1" != -- ]; do
  case $1 in
    cgroup) echo $$ > "$2/cgroup.procs"; shift 2 ;;
    bind)
      if [ -d "$2" ]; then mkdir -p "$3"; else mkdir -p "${3%/*}"; : > "$3"; fi
      mount --bind "$2" "$3"; shift 3 ;;
    root)
      mkdir "$STAGE/lower" "$STAGE/writable" "$STAGE/root"
      idmap "$2" "$STAGE/lower" "$OWNER" "$OTHERS"
      mount -t tmpfs -o "mode=0755,size=$3,nosuid,nodev" orchard-root "$STAGE/writable"
      mkdir "$STAGE/writable/upper" "$STAGE/writable/work"
      chown "$OWNER:$OWNER" "$STAGE/writable/upper"
      mount -t overlay -o "lowerdir=$STAGE/lower,upperdir=$STAGE/writable/upper,workdir=$STAGE/writable/work" \
        orchard-overlay "$STAGE/root"
      shift 3 ;;
    folder) mkdir -p "$2"; shift 2 ;;
    file) mkdir -p "${2%/*}"; [ -e "$2" ] || : > "$2"; shift 2 ;;
  esac
done
shift
exec "$@"
"""


def staged(index: int) -> str:
    """Name the staging place of the source with this index."""
    return f"{STAGE}/{index}"


class Staging:
    """Collect the steps of one launch."""

    def __init__(self, idmap: Sequence[str] = ("false",)) -> None:
        self._idmap = idmap
        self._steps: list[str] = []
        self._count = 0

    def join(self, cgroups: Sequence[str]) -> None:
        """Enter cgroups before anything else is started."""
        for cgroup in cgroups:
            self._steps += ["cgroup", cgroup]

    def bind(self, source: str) -> str:
        """Make a source reachable; give the path to use."""
        place = staged(self._count)
        self._count += 1
        self._steps += ["bind", source, place]
        return place

    def bind_at(self, source: str, name: str) -> str:
        """Make a source reachable by a name of its own."""
        place = f"{STAGE}/{name}"
        self._steps += ["bind", source, place]
        return place

    def root(self, rootfs: str, size_bytes: int, folders: Sequence[str], files: Sequence[str]) -> str:
        """Make a writable root over a folder, with places for mounts, which only root can make there; give its path."""
        self._steps += ["root", rootfs, str(size_bytes)]
        for folder in folders:
            self._steps += ["folder", ROOT + folder]
        for file in files:
            self._steps += ["file", ROOT + file]
        return ROOT

    def argv(self, uid: int, command: Sequence[str]) -> list[str]:
        """Spell the whole launch."""
        script = f"set -e\nSTAGE={STAGE}\nOWNER={uid}\nOTHERS={OTHERS}\n"
        script += f'idmap() {{ {shlex.join(self._idmap)} "$@"; }}\n{_SCRIPT}'
        words = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "orchard-launch"]
        words += [*self._steps, "--", "setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        return [*words, "--inh-caps=-all", *command]
