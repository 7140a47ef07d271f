"""`orchard prove` on what the real proxy recorded of the real tiny server."""

import json
import urllib.request

import pytest
from support.children import orchard, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with orchard("policy", "tiny", folder=tmp_path_factory.mktemp("tiny")) as url:
        yield url


@pytest.fixture(scope="module")
def export(tiny, tmp_path_factory):
    """Three rollouts of two turns, recorded and exported."""
    folder = tmp_path_factory.mktemp("recorded")
    with orchard("serve", "--upstream", tiny, "--data", str(folder / "data"), "--open", folder=folder) as proxy:
        for rollout in "abc":
            messages = [{"role": "user", "content": f"tell me of {rollout}"}]
            for turn in range(2):
                body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 1.5, "seed": turn}
                headers = {"Authorization": f"Bearer {rollout}", "Content-Type": "application/json"}
                request = urllib.request.Request(f"{proxy}/v1/chat/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=30) as answer:
                    said = json.load(answer)["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    assert run("export", "--data", str(folder / "data"), "--out", str(folder / "out")).returncode == 0
    return folder / "out"


def prove(export, upstream, *more):
    return run("prove", str(export), "--upstream", upstream, *more)


def test_recorded_tokens_are_proved_on_the_engine_that_sampled_them(export, tiny):
    done = prove(export, tiny, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert (report["calls"], report["rollouts"], report["engine"], report["bound"]) == (6, 3, "vllm", 1e-4)
    assert report["max_abs"] <= 1e-4
    assert report["control_max_abs"] > 1e-3


def test_the_verdict_is_the_last_line(export, tiny):
    done = prove(export, f"{tiny}/v1/", "--calls", "2", "--seed", "7")
    assert done.returncode == 0
    assert done.stdout.startswith("re-feed: 2 answers of 2 rollouts, ")
    assert done.stdout.splitlines()[-1] == "re-feed: ok"


def test_other_weights_fail_it(export, tmp_path):
    with orchard("policy", "tiny", "--seed", "1", folder=tmp_path) as other:
        done = prove(export, other)
    assert done.returncode == 1
    assert "not this engine's" in done.stdout
    assert done.stdout.splitlines()[-1] == "re-feed: FAILED"


def test_a_bound_that_the_arithmetic_cannot_keep_fails_it(export, tiny):
    assert prove(export, tiny, "--bound", "1e-12").returncode == 1


@pytest.mark.parametrize(
    ("upstream", "said"),
    [("http://127.0.0.1:9", "cannot be reached"), ("not a url", "cannot be reached")],
    ids=["nobody there", "no URL"],
)
def test_an_engine_that_is_not_there_is_one_sentence(export, upstream, said):
    done = prove(export, upstream)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_export_is_one_sentence(tmp_path, tiny):
    done = prove(tmp_path, tiny)
    assert done.returncode == 1
    assert "is not an Orchard export" in done.stderr


def test_the_proxy_is_not_the_engine(export, tmp_path, tiny):
    with orchard("serve", "--upstream", tiny, "--data", str(tmp_path / "data"), "--open", folder=tmp_path) as proxy:
        done = prove(export, proxy)
    assert done.returncode == 1
    assert "the engine's own URL, not the proxy's" in done.stderr
