"""Manifests: what a good one becomes, and the sentence that each bad one gets."""

import subprocess
from pathlib import Path

import msgspec
import pytest
from manifest_kit import GOOD, REQUEST, manifest_with

from harness_images import fields, manifest
from harness_images.fields import PLACEHOLDERS
from harness_images.manifest import MOST_ARGUMENT_BYTES, ManifestError
from orchard_proxy.schema.launch import FileToWrite, HarnessError
from orchard_proxy.schema.sandbox import Mount

PAGE = Path(__file__).parents[2] / "docs" / "harness-manifest.md"


def planned(text, **changes):
    described = manifest.parse(text)
    request = msgspec.structs.replace(REQUEST, **changes)
    mounts = [Mount(source="/i", target="/i")]
    return manifest.plan(described, request, install="/i", mounts=mounts, args=manifest.with_args(described, {}))


def test_a_small_manifest_has_plain_defaults():
    described = manifest.parse(GOOD)
    assert (described.name, described.install.kind, described.result.source) == ("my-agent", "none", "stdout")


def test_everything_that_a_plan_holds():
    plan = planned(
        manifest_with(
            '[args]\neffort = "high"\n[install]\nfiles = ["a.py"]',
            launch=(
                'command = ["{install}/a.py", "-m={model}", "{effort}", "{{effort}}", "${{home}}"]\n'
                'stdin = "{prompt}"\n'
                'env = {URL = "{base_url}", ROOT = "{root_url}", KEY = "{api_key}", T = "{timeout_s}"}'
            ),
            rest=(
                '[[launch.files]]\npath = "{home}/c.json"\ncontent = \'{"a":{"m":{model:json}},"p":{prompt:json}}\'\n'
                "mode = 0o600\n"
                '[result]\nfrom = "file_json"\npath = "{workdir}/r.json"\nanswer = "/a"'
            ),
        )
    )
    assert plan.argv == ["/i/a.py", "-m=tiny", "high", "{effort}", "${home}"]
    assert plan.stdin == "Say {api_key} and it's done"
    assert plan.env == {
        "URL": "http://127.0.0.1:8080/v1",
        "ROOT": "http://127.0.0.1:8080",
        "KEY": "key-1",
        "T": "60",
    }
    content = '{"a":{"m":"tiny"},"p":"Say {api_key} and it\'s done"}'
    assert plan.files == [FileToWrite(path="/home/agent/c.json", content=content, mode=0o600)]
    assert (plan.result_from, plan.result_path, plan.result_pointer) == ("file_json", "/workspace/r.json", "/a")
    assert (plan.harness, plan.version, plan.timeout_s, plan.mounts[0].source) == ("my-agent", "1.0", 60, "/i")


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        pytest.param("it's", """'it'"'"'s'""", id="quote"),
        pytest.param("$(x) `y`\n", "'$(x) `y`\n'", id="nothing-is-run"),
        pytest.param("", "''", id="empty-is-a-word"),
    ],
)
def test_shell_form_is_one_word(value, filled):
    plan = planned(manifest_with(launch='command = ["sh", "-c", "agent {prompt:shell}"]'), prompt=value)
    assert plan.argv[2] == f"agent {filled}"


BAD = [
    pytest.param("name = ", "not TOML: Invalid value", id="no-toml"),
    pytest.param("x = 1", "the top of the file has no key `x`", id="unknown-at-top"),
    pytest.param(
        manifest_with('licens = "MIT"'), "no key `licens`; did you mean `licence`?", id="unknown-with-a-guess"
    ),
    pytest.param(
        manifest_with(launch='comand = ["a"]'), "[launch] has no key `comand`; did you mean `command`?", id="in-launch"
    ),
    pytest.param(
        manifest_with(rest='[[launch.files]]\npath = "{home}/x"\ntext = ""'),
        "[launch.files[0]] has no key `text`",
        id="in-files",
    ),
    pytest.param(
        manifest_with(rest='[result.success]\nequal = ["x"]'),
        "[result.success] has no key `equal`; did you mean `equals`?",
        id="in-success",
    ),
    pytest.param(
        manifest_with(rest='[result]\nsource = "stdout"'), "[result] has no key `source`", id="the-key-is-called-from"
    ),
    pytest.param(
        'version = "1"\ndialects = []\n[launch]\ncommand = []', "the top of the file lacks the key `name`", id="no-name"
    ),
    pytest.param(GOOD.replace('"1.0"', "1.0"), "version: expected `str`, got `float`", id="version-as-number"),
    pytest.param(GOOD.replace('"chat"', '"chta"'), "it can be 'chat', 'completions'", id="unknown-dialect"),
    pytest.param(manifest_with('[install]\nkind = "npm"'), "it can be 'none', 'pip'", id="unknown-install"),
    pytest.param(
        manifest_with(rest='[result]\nfrom = "stderr"'), "it can be 'stdout', 'stdout_json'", id="unknown-source"
    ),
    pytest.param(GOOD.replace("my-agent", "My_Agent"), "lower-case letters, digits and single hyphens", id="bad-name"),
    pytest.param(GOOD.replace("1.0", "latest/1"), "pin one, like 2.4.6", id="bad-version"),
    pytest.param(GOOD.replace('["chat"]', "[]"), "dialects is empty", id="no-dialect"),
    pytest.param(manifest_with('[args]\nmodel = "x"'), "[args] cannot have 'model'", id="arg-hides-a-placeholder"),
    pytest.param(manifest_with("[args]\nturns = 3"), "expected `str`, got `int`", id="arg-is-no-text"),
    pytest.param(manifest_with('[install]\npython = "3.11"'), "write it like '>=3.10,<3.14'", id="bad-python"),
    pytest.param(
        manifest_with('[install]\nkind = "pip"'), "kind is 'pip' but packages is empty", id="nothing-to-install"
    ),
    pytest.param(manifest_with('[install]\npackages = ["a==1"]'), "need kind = 'pip'", id="packages-without-pip"),
    pytest.param(
        manifest_with('[install]\nkind = "pip"\npackages = ["a>=1"]'), "'a>=1' is not pinned", id="not-pinned"
    ),
    pytest.param(
        manifest_with('[install]\nfiles = ["../a.py"]'), "must be a plain name of a file beside", id="file-outside"
    ),
    pytest.param(manifest_with(launch="command = []"), "command is empty", id="no-command"),
    pytest.param(manifest_with(launch='command = ["a"]'), "the harness would not learn its task", id="prompt-unused"),
    pytest.param(
        manifest_with(launch='command = ["{install}/a", "{prompt}"]'), "[install] puts nothing there", id="no-install"
    ),
    pytest.param(
        manifest_with(launch='command = ["a", "{prompt}"]\nenv = {"A-B" = "1"}'),
        "'A-B' is no name of a variable",
        id="env",
    ),
    pytest.param(
        manifest_with(launch='command = ["a", "{prompt}", "{modle}"]'),
        "{modle} is no placeholder (there are api_key",
        id="typo",
    ),
    pytest.param(
        manifest_with(launch='command = ["a", "{prompt:yaml}"]'), "{prompt:yaml} has no form `yaml`", id="unknown-form"
    ),
    pytest.param(
        manifest_with(rest='[[launch.files]]\npath = "/etc/x"'), "'/etc/x' must begin with {home}", id="file-in-etc"
    ),
    pytest.param(manifest_with(rest='[result]\nfrom = "file"'), "needs a path that begins with {home}", id="no-path"),
    pytest.param(manifest_with(rest='[result]\npath = "{home}/x"'), "reads no file; remove path", id="useless-path"),
    pytest.param(manifest_with(rest='[result]\nanswer = "/a"'), "is plain text", id="pointer-into-text"),
    pytest.param(
        manifest_with(rest='[result]\nfrom = "stdout_json"\nanswer = "a"'),
        "a JSON pointer begins with /",
        id="no-pointer",
    ),
    pytest.param(
        manifest_with(rest='[result]\nfrom = "stdout_json"\n[result.success]\npointer = "/a"'),
        "pointer and equals need each other",
        id="half-a-condition",
    ),
    pytest.param(
        manifest_with(rest='[result]\nfrom = "stdout_json"\n[result.success]\nmatches = "x"'),
        "matches is for plain text",
        id="pattern-on-json",
    ),
    pytest.param(manifest_with(rest='[result.success]\nmatches = "("'), "no regular expression", id="bad-pattern"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD)
def test_a_bad_manifest_gets_a_sentence_that_names_the_file_and_the_key(text, sentence):
    with pytest.raises(ManifestError) as raised:
        manifest.parse(text, where="here/harness.toml")
    message = str(raised.value)
    assert message.startswith("here/harness.toml: ")
    assert sentence in message
    assert message[-1] in ".?"
    assert raised.value.failure.code == "bad_manifest"


def test_unknown_arguments_are_named_with_a_guess():
    described = manifest.parse(manifest_with('[args]\nmax_turns = "3"'))
    assert manifest.with_args(described, {"max_turns": "9"}) == {"max_turns": "9"}
    with pytest.raises(HarnessError, match="no argument 'max_turn'; did you mean `max_turns`"):
        manifest.with_args(described, {"max_turn": "9"})


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        pytest.param("x" * (MOST_ARGUMENT_BYTES + 1), "argument_too_long", id="too-long"),
        pytest.param("ü" * (MOST_ARGUMENT_BYTES // 2 + 1), "argument_too_long", id="bytes-count-not-characters"),
        pytest.param("a\0b", "argument_with_nul", id="nul"),
    ],
)
def test_a_prompt_that_no_command_line_holds(prompt, code):
    with pytest.raises(HarnessError, match="takes the prompt on its command line") as raised:
        planned(GOOD, prompt=prompt)
    assert (raised.value.failure.code, raised.value.failure.blame) == (code, "task")


def test_the_longest_prompt_still_starts_a_program():
    plan = planned(GOOD, prompt="x" * MOST_ARGUMENT_BYTES)
    assert subprocess.run(["true", *plan.argv[1:]], check=False).returncode == 0
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true", "x" + plan.argv[1]], check=False)


def test_stdin_takes_a_prompt_of_any_length():
    plan = planned(manifest_with(launch='command = ["agent"]\nstdin = "{prompt}"'), prompt="x" * 1_000_000)
    assert len(plan.stdin) == 1_000_000


def test_every_placeholder_is_documented():
    page = PAGE.read_text()
    assert [name for name in sorted(PLACEHOLDERS) if f"`{{{name}}}`" not in page] == []


def test_every_key_is_documented():
    page = PAGE.read_text()
    tables = [fields.Manifest, fields.Install, fields.Launch, fields.LaunchFile, fields.Result, fields.Success]
    keys = {field.encode_name for table in tables for field in msgspec.structs.fields(table)}
    assert [key for key in sorted(keys) if f"`{key}`" not in page and f"[{key}]" not in page] == []
