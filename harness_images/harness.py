"""A manifest, its folder and its arguments as the `Harness` that the runner is given."""

from collections.abc import Mapping
from pathlib import Path

from harness_images import install, manifest, result
from harness_images.disk import Installed
from harness_images.fields import Manifest
from orchard_proxy.schema.launch import HarnessError, HarnessResult, LaunchPlan, LaunchRequest
from orchard_proxy.schema.sandbox import ExecResult


class ManifestHarness:
    """One harness, ready to be launched once it is installed."""

    def __init__(self, described: Manifest, folder: Path, args: Mapping[str, str] | None = None) -> None:
        self.manifest = described
        self.folder = folder
        self.args = manifest.with_args(described, dict(args or {}))
        self._installed: Installed | None = None

    @property
    def name(self) -> str:
        """Name in the registry."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """Pinned version."""
        return self.manifest.version

    async def install(self) -> None:
        """Put it into the cache, if it is not there. Raises HarnessError that says what failed and what to do."""
        self._installed = await install.install(self.manifest, self.folder)

    async def installed(self) -> str | None:
        """Return the folder of its install ("" where there is nothing to install), None while there is no whole one."""
        found = await install.find(self.manifest, self.folder)
        return None if found is None else found.folder

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Say how to launch it. Raises HarnessError, e.g. for a prompt that no command line can hold."""
        if self._installed is None:
            raise HarnessError("not_installed", f"{self.name} is not installed yet; await install() before plan().")
        here = self._installed
        return manifest.plan(self.manifest, request, install=here.folder, mounts=here.mounts(), args=self.args)

    def outline(self) -> LaunchPlan:
        """Return the plan with its placeholders left in place, to look at."""
        names = ("prompt", "model", "base_url", "api_key", "workdir", "home")
        request = LaunchRequest(timeout_s=0, **{name: f"{{{name}}}" for name in names})
        return manifest.plan(self.manifest, request, install="{install}", mounts=[], args=self.args)

    def result(self, plan: LaunchPlan, run: ExecResult, written: bytes | None) -> HarnessResult:
        """Read the outcome from the exec and, where the plan names a file, its content (None: there is none)."""
        return result.read(self.manifest.result, plan, run, written)
