"""Who a request belongs to, by every carrier of a key."""

import base64

import pytest
from multidict import CIMultiDict

from orchard_proxy.server import identify, keys
from orchard_proxy.server.registry import Entry, Registry

KEY, OTHER, DONE = "orch-one", "orch-two", "orch-done"
CHAT = "/v1/chat/completions"


def registry(*, open_mode: bool = False) -> Registry:
    made = Registry(open_mode=open_mode, admin_sha256=keys.digest("the-admin-key"))
    for key, name, finished in [(KEY, "r1", None), (OTHER, "r2", None), (DONE, "r3", 5)]:
        made.add(Entry(name, keys.digest(key), implicit=False, body_sha256="", finished_us=finished))
    return made


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}


def ask(headers=None, path=CHAT, query="", method="POST", open_mode=False):
    return identify.identify(method, path, query, headers or {}, registry(open_mode=open_mode))


CARRIERS = [
    pytest.param({"Authorization": f"Bearer {KEY}"}, CHAT, "", id="bearer"),
    pytest.param({"Authorization": f"bearer  {KEY}"}, CHAT, "", id="bearer-spelling"),
    pytest.param(basic(f"user:{KEY}"), CHAT, "", id="basic-password"),
    pytest.param(basic(f"{KEY}:"), CHAT, "", id="basic-user"),
    pytest.param({"x-api-key": KEY}, CHAT, "", id="x-api-key"),
    pytest.param({"x-goog-api-key": KEY}, CHAT, "", id="x-goog-api-key"),
    pytest.param({}, CHAT, f"alt=sse&key={KEY}", id="query"),
    pytest.param({}, f"/r/{KEY}{CHAT}", "", id="path"),
    pytest.param(
        {"x-api-key": KEY, "Authorization": f"Bearer {KEY}"}, f"/r/{KEY}{CHAT}", f"key={KEY}", id="all-the-same"
    ),
    pytest.param({"Authorization": "Bearer ", "x-api-key": KEY}, CHAT, "", id="empty-bearer"),
]


@pytest.mark.parametrize(("headers", "path", "query"), CARRIERS)
def test_every_carrier_names_the_rollout(headers, path, query):
    known = ask(headers, path, query)
    assert known.entry.rollout_id == "r1"
    assert known.path == CHAT


@pytest.mark.parametrize(
    ("headers", "path", "query", "status", "code"),
    [
        pytest.param({}, CHAT, "", 401, "missing_api_key", id="none"),
        pytest.param({"Authorization": "Bearer nonsense"}, CHAT, "", 401, "invalid_api_key", id="unknown"),
        pytest.param({"Authorization": "Digest x"}, CHAT, "", 401, "missing_api_key", id="other-scheme"),
        pytest.param({"Authorization": "Basic ???"}, CHAT, "", 401, "missing_api_key", id="bad-basic"),
        pytest.param(
            {"x-api-key": KEY, "Authorization": f"Bearer {OTHER}"}, CHAT, "", 400, "conflicting_keys", id="two-headers"
        ),
        pytest.param({"x-api-key": KEY}, f"/r/{OTHER}{CHAT}", "", 400, "conflicting_keys", id="header-and-path"),
        pytest.param({}, CHAT, f"key={KEY}&key={OTHER}", 400, "conflicting_keys", id="two-queries"),
        pytest.param({"x-api-key": DONE}, CHAT, "", 410, "rollout_finished", id="finished"),
        pytest.param({"x-api-key": "the-admin-key"}, CHAT, "", 403, "admin_key_on_data_plane", id="admin"),
        pytest.param({"x-api-key": KEY}, "/v1/nothing", "", 404, "unknown_route", id="route"),
        pytest.param({"x-api-key": KEY}, "/r/x", "", 404, "unknown_route", id="key-without-route"),
    ],
)
def test_everything_else_is_refused_with_a_sentence(headers, path, query, status, code):
    refused = ask(headers, path, query)
    assert (refused.status, refused.code) == (status, code)
    assert refused.message.endswith(".")


def test_a_missing_v1_is_explained():
    assert "/v1/chat/completions" in ask({"x-api-key": KEY}, "/chat/completions").message


def test_a_wrong_method_is_refused():
    assert ask({"x-api-key": KEY}, CHAT, method="GET").status == 405


def test_session_ids_in_the_request_decide_nothing():
    spoofed = {"x-session-id": "r2", "x-orchard-rollout": "r2", "session_id": "r2", "Authorization": f"Bearer {KEY}"}
    assert ask(spoofed).entry.rollout_id == "r1"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("my-run.1", "my-run.1"),
        ("x" * 64, "x" * 64),
        ("x" * 65, "anon-" + keys.digest("x" * 65)[:12]),
        ("sk-abc", "anon-" + keys.digest("sk-abc")[:12]),
        ("AIzaSy", "anon-" + keys.digest("AIzaSy")[:12]),
        ("orch-of-another-server", "anon-" + keys.digest("orch-of-another-server")[:12]),
        ("ein schlüssel", "anon-" + keys.digest("ein schlüssel")[:12]),
        ("../../etc", "anon-" + keys.digest("../../etc")[:12]),
        ("..", "anon-" + keys.digest("..")[:12]),
        ("SK-foo", "anon-" + keys.digest("SK-foo")[:12]),
        ("hf_AbC123", "anon-" + keys.digest("hf_AbC123")[:12]),
        ("AKIAIOSFODNN7EXAMPLE", "anon-" + keys.digest("AKIAIOSFODNN7EXAMPLE")[:12]),
        ("ghp_x", "anon-" + keys.digest("ghp_x")[:12]),
        ("skills-run-1", "skills-run-1"),
    ],
)
def test_open_mode_labels(key, name):
    assert ask({"x-api-key": key}, open_mode=True).entry.rollout_id == name


def test_open_mode_still_knows_real_keys_and_protects_their_names():
    assert ask({"x-api-key": KEY}, open_mode=True).entry.rollout_id == "r1"
    assert ask({"x-api-key": "r1"}, open_mode=True).status == 403
    assert ask({"x-api-key": DONE}, open_mode=True).status == 410
    assert ask({"x-api-key": "the-admin-key"}, open_mode=True).status == 403
    assert ask({}, open_mode=True).status == 401


def test_an_implicit_rollout_never_answers_410():
    made = registry(open_mode=True)
    made.add(Entry("lab", "", implicit=True, body_sha256="", finished_us=7))
    assert made.identify("lab").rollout_id == "lab"


@pytest.mark.parametrize(("second", "conflicts"), [(OTHER, True), (KEY, False)], ids=["two-keys", "one-key-twice"])
@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "x-goog-api-key"])
def test_every_line_of_a_header_counts(name, second, conflicts):
    scheme = "Bearer " if name == "Authorization" else ""
    headers = CIMultiDict([(name, scheme + KEY), (name.lower(), scheme + second)])
    found = keys.carried(CHAT, "", headers)
    assert (found.key, found.conflict) == (KEY, conflicts)


def test_only_listed_headers_are_recorded_or_sent_on():
    headers = {
        "Authorization": "Bearer a",
        "X-Api-Key": "a",
        "Cookie": "a",
        "Proxy-Authorization": "a",
        "User-Agent": "sdk",
        "X-Stainless-Retry-Count": "1",
        "X-Request-Id": "q",
        "X-New-Secret": "a",
    }
    recorded = identify.recorded_headers(headers)
    assert recorded == {"user-agent": "sdk", "x-stainless-retry-count": "1", "x-request-id": "q"}
    assert identify.upstream_headers({"x-request-id": "q", "Authorization": "a"}) == {"x-request-id": "q"}


def test_a_key_is_made_again_from_the_secret_and_fits_a_path_and_a_header():
    key = keys.mint(b"secret", "r1")
    assert key == keys.mint(b"secret", "r1")
    assert key != keys.mint(b"secret", "r2")
    assert key != keys.mint(b"other", "r1")
    assert keys.carried(f"/r/{key}/v1/models", "", {}).key == key


def test_a_secret_file_is_private_and_made_once(tmp_path):
    path = tmp_path / "admin.key"
    first = keys.load_or_create(path)
    assert keys.load_or_create(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["admin.key"]
