import pytest
from aiohttp import web
from fakes.origin import an_origin

from orchard_proxy.errors import ControlError
from orchard_proxy.runner.control import ControlClient, ProxyLostError
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.records import Failure


def script(*answers):
    """Answer each request with the next one: a status, or a status and a body; the last one again and again."""
    left = list(answers)

    async def handle(request, body):
        status, told = left.pop(0) if len(left) > 1 else left[0]
        if status == "cut":
            request.transport.abort()
        return web.json_response(told, status=200 if status == "cut" else status)

    return handle


CREATED = (201, {"rollout_id": "r", "api_key": "k", "base_urls": {}})


@pytest.mark.parametrize("first", [500, 502, 503, "cut"])
async def test_a_proxy_that_breaks_is_asked_again(first):
    async with an_origin(script((first, {}), (first, {}), CREATED)) as origin:
        async with ControlClient(lambda: origin.url, "admin", patience_s=10) as control:
            assert (await control.create("r", task_id="t")).api_key == "k"
        assert [body for *_, body in origin.asked] == [b'{"rollout_id":"r","task_id":"t"}'] * 3
        assert origin.asked[0][2]["Authorization"] == "Bearer admin"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
async def test_a_refusal_is_final_and_says_why(status):
    refusal = {"error": {"message": "No. Do that.", "code": "x"}}
    async with an_origin(script((status, refusal))) as origin:
        async with ControlClient(lambda: origin.url, "admin") as control:
            with pytest.raises(ControlError, match=r"No\. Do that\.") as caught:
                await control.create("r")
        assert caught.value.status == status
        assert len(origin.asked) == 1


async def test_patience_ends():
    async with ControlClient(lambda: "http://127.0.0.1:9", "admin", patience_s=0.3) as control:
        with pytest.raises(ProxyLostError, match=r"127\.0\.0\.1:9 does not answer POST /rollouts"):
            await control.create("r")


async def test_a_proxy_with_a_new_port_is_found():
    async with an_origin(script(CREATED)) as origin:
        urls = iter(["http://127.0.0.1:9", "http://127.0.0.1:9"])
        async with ControlClient(lambda: next(urls, origin.url), "admin") as control:
            assert (await control.create("r")).rollout_id == "r"


async def test_pages_are_joined():
    def page(first, count):
        return (200, {"rollouts": [{"rollout_id": f"r{n}"} for n in range(first, first + count)], "derived": True})

    async with an_origin(script(page(0, 1000), page(1000, 3))) as origin:
        async with ControlClient(lambda: origin.url, "admin") as control:
            found = [rollout.rollout_id async for rollout in control.rollouts("run")]
        assert found == [f"r{n}" for n in range(1003)]
        assert "after=r999" in origin.asked[1][1]


async def test_a_list_that_is_not_up_to_date_is_no_list():
    async with an_origin(script((200, {"rollouts": [], "derived": False}))) as origin:
        async with ControlClient(lambda: origin.url, "admin") as control:
            with pytest.raises(ProxyLostError, match="not up to date"):
                await anext(control.rollouts("run"))


async def test_readiness_is_not_waited_for():
    async with an_origin(script((503, {"reason": "no engine"}), (200, {}))) as origin:
        async with ControlClient(lambda: origin.url, "admin") as control:
            assert "no engine" in await control.ready()
            assert await control.ready() is None


async def test_a_real_control_plane(house):
    """Create twice, finish twice, list, calls, samples: against `orchard serve`."""
    control, run_id = house.control, house.plan.run_id
    fields = {"run_id": run_id, "task_id": "t", "metadata": {"a": 1}}
    made = await control.create(f"{run_id}:t:0-1", **fields)
    assert await control.create(f"{run_id}:t:0-1", **fields) == made
    with pytest.raises(ControlError) as caught:
        await control.create(f"{run_id}:t:0-1", run_id=run_id)
    assert caught.value.status == 409
    failure = Failure(code="c", blame=Blame.INFRA, phase=Phase.GRADE, retryable=True, message="m")
    for reward in (0.25, 0.5):
        await control.finish(
            made.rollout_id,
            status=RolloutStatus.FAILED,
            reward=reward,
            rewards={"x": reward},
            metadata={"b": 2},
            failure=failure,
        )
    (listed,) = [rollout async for rollout in control.rollouts(run_id)]
    assert (listed.status, listed.reward, listed.failure) == (RolloutStatus.FAILED, 0.5, failure)
    assert listed.metadata == {"a": 1, "b": 2}
    assert await control.calls(made.rollout_id) == []
    assert (await control.samples(made.rollout_id))["samples"] == []
