"""A real sandbox back end that fails when the test says so: a real one cannot be made to."""

from env_service.backends.local import LocalBackend
from orchard_proxy.schema.enums import Phase
from orchard_proxy.schema.sandbox import SandboxError


class FlakyBackend(LocalBackend):
    """Fails to create the sandboxes whose id ends as one of `broken`."""

    def __init__(self, *broken, retryable=True):
        super().__init__()
        self.broken = broken
        self.retryable = retryable

    async def create(self, spec):
        if spec.sandbox_id.endswith(self.broken):
            raise SandboxError("flaky", "the test wants it to fail", phase=Phase.CREATE, retryable=self.retryable)
        return await super().create(spec)
