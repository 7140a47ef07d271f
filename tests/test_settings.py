"""Where settings come from, and what is said of a wrong one."""

import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.settings import ServeSettings, load_serve


def load(tmp_path, monkeypatch, *, toml=None, env=None, flags=None):
    path = tmp_path / "orchard.toml"
    if toml is not None:
        path.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    for name, value in (env or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return load_serve(flags or {})


def test_flags_beat_the_environment_beats_the_file(tmp_path, monkeypatch):
    toml = '[serve]\nport = 1\nhost = "127.0.0.2"\ndata = "d"\n'
    env = {"ORCHARD_SERVE__PORT": "2", "ORCHARD_SERVE__HOST": "127.0.0.3"}
    made = load(tmp_path, monkeypatch, toml=toml, env=env, flags={"port": 3, "host": None})
    assert (made.port, made.host, made.data) == (3, "127.0.0.3", "d")


def test_without_any_source_the_defaults_hold(tmp_path, monkeypatch):
    assert load(tmp_path, monkeypatch) == ServeSettings()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"toml": "[serve]\nportt = 1"}, r"orchard\.toml, \[serve\].*portt", id="unknown-key"),
        pytest.param({"toml": "[serv]\nport = 1"}, "'serv' is no table", id="unknown-table"),
        pytest.param({"toml": "port = 1"}, "'port' is no table", id="no-table"),
        pytest.param({"toml": "serve = 3"}, "'serve' is no table", id="table-is-a-number"),
        pytest.param({"toml": "[serve\n"}, "not valid TOML", id="torn"),
        pytest.param({"toml": b"\xff\xfe"}, "not valid TOML", id="binary"),
        pytest.param({"toml": "[serve]\nport = 99999"}, r"orchard\.toml.*port", id="port-too-large"),
        pytest.param({"toml": "[serve]\nport = -5"}, "port", id="port-negative"),
        pytest.param({"toml": "[serve]\nmax_body_bytes = -1"}, "max_body_bytes", id="negative-bytes"),
        pytest.param({"toml": "[serve]\nkeepalive_s = 0"}, "keepalive_s", id="zero-seconds"),
        pytest.param({"toml": "[serve]\ndrain_s = -1"}, "drain_s", id="negative-drain"),
        pytest.param({"env": {"ORCHARD_SERVE__NOPE": "1"}}, "environment.*nope", id="environment-unknown"),
        pytest.param({"env": {"ORCHARD_SERVE__PORT": "x"}}, "environment.*port", id="environment-type"),
        pytest.param({"flags": {"engine": "triton"}}, "flags.*engine", id="flag"),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(tmp_path, monkeypatch, given, said):
    with pytest.raises(UsageError, match=said):
        load(tmp_path, monkeypatch, **given)


def test_a_config_that_is_asked_for_must_exist(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load_serve({}, config=tmp_path / "none.toml")
