"""Real sandboxes. Nothing here is faked."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from env_service.backends.local import LocalBackend
from env_service.backends.sandbox import LocalSandbox
from orchard_proxy.schema.sandbox import SandboxSpec

Make = Callable[..., Awaitable[LocalSandbox]]


@pytest.fixture
async def backend() -> AsyncIterator[LocalBackend]:
    made = LocalBackend()
    yield made
    await made.close()


@pytest.fixture
def make(backend: LocalBackend) -> Make:
    async def make(**wanted) -> LocalSandbox:
        made = await backend.create(SandboxSpec(**{"sandbox_id": "test", **wanted}))
        assert isinstance(made, LocalSandbox)
        return made

    return make


@pytest.fixture
async def sb(make: Make) -> LocalSandbox:
    return await make()
