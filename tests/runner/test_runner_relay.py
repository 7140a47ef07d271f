import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from fakes.origin import an_origin
from yarl import URL

from orchard_proxy.runner.relay import Relay, is_data_plane, short_socket

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def relayed(tmp_path, handle):
    socket = tmp_path / "s.sock"
    async with an_origin(handle) as origin, Relay(socket, origin.url + "/"):
        connector = aiohttp.UnixConnector(str(socket))
        async with aiohttp.ClientSession("http://h", connector=connector, auto_decompress=False) as session:
            yield origin, session


async def test_a_request_passes_as_it_is(tmp_path):
    async def handle(request, body):
        return web.Response(status=418, body=b"\x1f\x8bnot-gzip", headers={"X-Told": "so", "Content-Encoding": "gzip"})

    async with relayed(tmp_path, handle) as (origin, session):
        headers = {"Authorization": "Bearer k", "X-Mine": "1", "Connection": "close, X-Hop", "X-Hop": "gone"}
        asked = URL(f"http://h{CHAT}?key=a%2Fb&x=1", encoded=True)
        async with session.post(asked, data=b'{"a": 1}', headers=headers) as answer:
            assert (answer.status, await answer.read()) == (418, b"\x1f\x8bnot-gzip")
            assert (answer.headers["X-Told"], answer.headers["Content-Encoding"]) == ("so", "gzip")
        ((method, path, sent, body),) = origin.asked
        assert (method, path, body) == ("POST", f"{CHAT}?key=a%2Fb&x=1", b'{"a": 1}')
        assert (sent["Authorization"], sent["X-Mine"]) == ("Bearer k", "1")
        assert "X-Hop" not in sent
        assert sent["Host"] == origin.url.removeprefix("http://")


async def test_a_large_body_passes_both_ways(tmp_path):
    async def handle(request, body):
        return web.Response(body=body)

    async with relayed(tmp_path, handle) as (origin, session):
        origin.handle = lambda request, body: _size(body)
        large = b"x" * 900_000
        async with session.post(CHAT, data=large) as answer:
            assert await answer.read() == b"900000"
        origin.handle = handle
        async with session.post(CHAT, data=large) as answer:
            assert await answer.read() == large


async def _size(body):
    return web.Response(text=str(len(body)))


async def test_a_stream_passes_event_by_event(tmp_path):
    go_on = asyncio.Event()

    async def handle(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with relayed(tmp_path, handle) as (_, session), session.post(CHAT, data=b"{}") as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"


async def test_a_stream_that_is_cut_off_is_cut_off(tmp_path):
    async def handle(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        request.transport.abort()
        return response

    async with relayed(tmp_path, handle) as (_, session), session.post(CHAT, data=b"{}") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_harness_that_leaves_is_seen_to_leave(tmp_path):
    async def handle(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.sleep(60)
        return response

    async with relayed(tmp_path, handle) as (origin, session):
        async with session.post(CHAT, data=b"{}") as answer:
            await answer.content.readany()
            answer.close()
        async with asyncio.timeout(2):
            await origin.left.wait()


async def test_a_proxy_that_is_not_there(tmp_path):
    async with Relay(tmp_path / "s.sock", "http://127.0.0.1:9"):
        connector = aiohttp.UnixConnector(str(tmp_path / "s.sock"))
        async with aiohttp.ClientSession("http://h", connector=connector) as session, session.post(CHAT) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (502, "proxy_unreachable")


@pytest.mark.parametrize(
    ("path", "let_through"),
    [
        ("/v1/chat/completions", True),
        ("/v1/models?x=../y", True),
        ("/r/key/v1/chat/completions", True),
        ("/v1/..a/x", True),
        ("/rollouts", False),
        ("/", False),
        ("/v1", False),
        ("/v12/x", False),
        ("/metrics", False),
        ("//v1/x", False),
        ("/v1/../rollouts", False),
        ("/v1/%2e%2E/rollouts", False),
        ("/v1/./x", False),
        ("/r/key/../../rollouts", False),
        ("/%76%31/x", False),
        ("http://other/v1/x", False),
        ("*", False),
    ],
)
def test_only_the_data_plane(path, let_through):
    assert is_data_plane(path) == let_through


async def test_what_is_not_the_data_plane_is_not_even_asked(tmp_path):
    async def handle(request, body):
        return web.Response()

    async with relayed(tmp_path, handle) as (origin, session):
        async with session.post("/rollouts", data=b"{}") as answer:
            assert answer.status == 404
        assert origin.asked == []


def test_a_socket_whose_path_is_too_long_lies_elsewhere(tmp_path):
    assert short_socket(tmp_path, "s", tmp_path / "spare") == tmp_path / "s"
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    assert short_socket(deep, "s", tmp_path / "spare") == tmp_path / "spare" / "s"
