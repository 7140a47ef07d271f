"""`orchard harness`: listing, showing, and trying harnesses for real."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.children import run

HARNESS = """
name = "my-agent"
version = "1.0"
dialects = ["chat"]
[install]
files = ["agent.sh"]
[launch]
command = ["/bin/bash", "{install}/agent.sh", "{prompt}"]
env = {BASE = "{base_url}", KEY = "{api_key}", MODEL = "{model}"}
"""
ASK = """
python3 -I - "$1" <<'E'
import json, os, sys, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["BASE"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Authorization", "Bearer " + os.environ["KEY"])
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
E
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Make a harness of one's own: a shell script."""
    monkeypatch.setenv("ORCHARD_CACHE", str(tmp_path / "cache"))

    def made(script, *, more="", **files):
        folder = tmp_path / "my-agent"
        folder.mkdir()
        (folder / "harness.toml").write_text(HARNESS + more)
        (folder / "agent.sh").write_text(script)
        for name, text in files.items():
            (folder / name).write_text(text)
        return str(folder)

    return made


def test_ls_names_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCHARD_CACHE", str(tmp_path))
    listed = run("harness", "ls")
    head, *rows = [line.split() for line in listed.stdout.splitlines()]
    assert head[:5] == ["name", "version", "dialects", "installed", "licence"]
    assert [row[:5] for row in rows] == [
        ["mini-swe-agent", "2.4.6", "chat", "no", "MIT"],
        ["react", "1.0", "chat", "no", "MIT"],
    ]
    (first, _) = json.loads(run("harness", "ls", "--json").stdout)
    assert (first["name"], first["dialects"], first["installed"]) == ("mini-swe-agent", ["chat"], False)


def test_show_gives_the_manifest_and_the_plan():
    shown = run("harness", "show", "mini_swe_agent").stdout
    assert 'name = "mini-swe-agent"' in shown
    assert '"--model=openai/{model}"' in shown
    told = json.loads(run("harness", "show", "react", "--harness-arg", "mode=text", "--json").stdout)
    assert told["manifest"]["result"]["from"] == "file_json"
    assert "--mode=text" in told["plan"]["argv"]
    assert told["plan"]["env"] == {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["show", "mini"], "no harness 'mini'. ", id="unknown"),
        pytest.param(["show", "./nowhere"], "nowhere has no harness.toml", id="no-folder"),
        pytest.param(["show", "react", "--harness-arg", "mode"], "takes NAME=VALUE, not 'mode'", id="no-value"),
        pytest.param(["check", "react", "--harness-arg", "mod=text"], "did you mean `mode`?", id="unknown-argument"),
    ],
)
def test_what_cannot_be_is_status_2(words, sentence):
    done = run("harness", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_harness_of_ones_own_works(own):
    folder = own(ASK)
    done = run("harness", "check", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["install", "ok"],
        ["sandbox", "ok"],
        ["proxy", "ok"],
        ["run", "ok"],
        ["record", "ok"],
        ["my-agent", "1.0"],
    ]
    assert "answered 'All is well.'" in done.stdout
    assert "1 calls, 1 branch, sampled" in done.stdout


GRADED = '[check]\nprompt = "go"\nscript = "check.toml"\ngrade = "grep -q gone out"\n'
GONE = "[[rule]]\nlast = 'go'\ntext = 'gone'\n"


def test_the_harness_is_checked_by_its_own_script_and_grade(own):
    folder = own(ASK + "\necho gone > out\n", more=GRADED, **{"check.toml": GONE})
    done = run("harness", "check", folder, "--json")
    checked = json.loads(done.stdout)
    assert (done.returncode, checked["ok"], checked["data"]) == (0, True, None)
    assert checked["steps"][3]["detail"] == "answered 'gone'"


@pytest.mark.parametrize(
    ("script", "more", "step", "told"),
    [
        pytest.param("echo hi", "", "record", "without a single model call", id="never-asked-the-model"),
        pytest.param("exit 0", "", "run", "it wrote nothing; it exited with 0", id="a-stub"),
        pytest.param("echo oh no >&2; exit 3", "", "run", "stderr: oh no", id="broken"),
        pytest.param("sleep 60", "", "run", "agent_timeout", id="hangs"),
        pytest.param("echo hi", '[check]\nscript = "check.toml"', "proxy", "check.toml is not a file", id="no-script"),
        pytest.param(ASK, GRADED.replace('script = "check.toml"\n', ""), "run", "its work is not", id="no-work"),
    ],
)
def test_a_harness_that_does_not_work(own, script, more, step, told):
    done = run("harness", "check", own(script, more=more), "--timeout", "10", "--json")
    checked = json.loads(done.stdout)
    assert (done.returncode, checked["ok"]) == (1, False)
    failed = checked["steps"][-1]
    assert (failed["name"], failed["ok"]) == (step, False)
    assert told in failed["detail"]
    assert "does not work here" in done.stderr
    assert Path(checked["data"], "data").is_dir() or step != "record"
    shutil.rmtree(checked["data"])


def test_an_install_that_fails_is_a_step_that_fails(own, monkeypatch):
    folder = own("true")
    path = Path(folder, "harness.toml")
    path.write_text(path.read_text().replace("[install]\n", '[install]\nkind = "pip"\npackages = ["no-such==1.0"]\n'))
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    done = run("harness", "check", folder, "--json")
    assert done.returncode == 1
    checked = json.loads(done.stdout)
    shutil.rmtree(checked["data"])
    (step,) = checked["steps"]
    assert (step["name"], step["ok"]) == ("install", False)
    assert "No matching distribution found for no-such==1.0" in step["detail"]
    assert "install  FAILED" in done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["react", "mini-swe-agent"])
def test_the_bundled_ones_work(name):
    done = run("harness", "check", name, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 calls, 1 branch, sampled" in done.stdout
