"""Finding harnesses by name and by path."""

import pytest
from manifest_kit import GOOD, REQUEST

from harness_images import registry
from orchard_proxy.schema.launch import HarnessError


def test_the_bundled_ones_are_all_well_formed():
    assert registry.names() == ["mini-swe-agent", "react"]
    for name in registry.names():
        harness = registry.find(name)
        assert harness.name == name
        assert harness.manifest.licence
        assert harness.outline().argv


@pytest.mark.parametrize("name", ["mini-swe-agent", "mini_swe_agent", "Mini-SWE-agent"])
def test_hyphens_and_underscores(name):
    assert registry.find(name).version == "2.4.6"


@pytest.mark.parametrize("path", ["{}", "{}/", "{}/harness.toml", "./my-folder", "./my-folder/harness.toml"])
def test_a_folder_of_ones_own(path, tmp_path, monkeypatch):
    (tmp_path / "my-folder").mkdir()
    (tmp_path / "my-folder" / "harness.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    found = registry.find(path.format(tmp_path / "my-folder"))
    assert (found.name, found.folder) == ("my-agent", tmp_path / "my-folder")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(HarnessError, match=r"no harness 'mini-swe'\. Did you mean mini-swe-agent\?") as raised:
        registry.find("mini-swe")
    assert "There are mini-swe-agent, react;" in str(raised.value)
    assert raised.value.failure.code == "unknown_harness"


def test_a_folder_without_its_slash(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "harness.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=r"The folder of that name is \./mine"):
        registry.find("mine")


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(HarnessError, match=r"has no harness\.toml"):
        registry.find(f"{tmp_path}/")


def test_a_bad_manifest_is_named_by_its_path(tmp_path):
    (tmp_path / "harness.toml").write_text("x = 1")
    with pytest.raises(HarnessError, match=f"{tmp_path}/harness.toml: the top of the file has no key"):
        registry.find(str(tmp_path))


def test_a_manifest_that_is_no_text(tmp_path):
    (tmp_path / "harness.toml").write_bytes(b"\xff")
    with pytest.raises(HarnessError, match="Cannot read"):
        registry.find(str(tmp_path))


def test_arguments_replace_defaults():
    argv = registry.find("react", {"mode": "text"}).outline().argv
    assert "--mode=text" in argv
    assert "--max-turns=50" in argv
    with pytest.raises(HarnessError, match=r"it has: command_timeout_s, .*max_turns, mode"):
        registry.find("react", {"color": "red"})


def test_no_plan_before_the_install():
    with pytest.raises(HarnessError, match=r"await install\(\) before plan\(\)"):
        registry.find("react").plan(REQUEST)
