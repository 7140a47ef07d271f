from pathlib import Path

import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.policy.tiny_script import load
from orchard_proxy.policy.tiny_template import Message, ToolCall

USER = Message(role="user", content="weather in Paris, please")
TALK = [Message(role="system", content="You are a cook."), USER]
CALLED = Message(role="assistant", tool_calls=(ToolCall(name="look", arguments='{"q": "Paris"}'),))
LOOPED = [*TALK, CALLED, Message(role="tool", content="sun, 21")]


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "s.toml"
        path.write_text(text, encoding="utf-8")
        return load(path)

    return write


@pytest.mark.parametrize(
    ("condition", "first", "looped"),
    [
        pytest.param("", True, True, id="none"),
        pytest.param("turn = 1", True, False, id="turn"),
        pytest.param("turn = [2, 3]", False, True, id="turns"),
        pytest.param("system = 'a cook'", True, True, id="system"),
        pytest.param("system = 'a smith'", False, False, id="system-other"),
        pytest.param("last = 'Paris'", True, False, id="last"),
        pytest.param("last = '^sun'", False, True, id="last-tool"),
        pytest.param("last_role = 'tool'", False, True, id="last-role"),
        pytest.param("any = 'cook.*Paris'", True, True, id="any-over-lines"),
        pytest.param("any = 'look .*Paris'", False, True, id="any-sees-calls"),
        pytest.param("turn = 1\nlast = 'Rome'", False, False, id="all-must-hold"),
    ],
)
def test_conditions(script, condition, first, looped):
    rules = script(f"[[rule]]\n{condition}\ntext = 'yes'\n")
    assert (rules.answer(TALK) is not None, rules.answer(LOOPED) is not None) == (first, looped)


def test_the_first_match_wins_and_no_match_is_free(script):
    rules = script("[[rule]]\nturn = 2\ntext = 'b'\n[[rule]]\ntext = 'a'\n[[rule]]\ntext = 'c'\n")
    assert [rules.answer(talk).text for talk in (TALK, LOOPED)] == ["a", "b"]
    assert script("[[rule]]\nturn = 9\ntext = 'a'\n").answer(TALK) is None


@pytest.mark.parametrize(
    ("say", "text"),
    [
        pytest.param("text = 'a'", "a", id="text"),
        pytest.param("text = 'a '\nrepeat = 3", "a a a ", id="repeat"),
        pytest.param("reasoning = 'r'\ntext = 'a'", "<think>r</think>a", id="reasoning"),
        pytest.param(
            "tool_calls = [{name = 'f', arguments = {x = 1, y = ['é']}}, {name = 'g'}]",
            '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": ["é"]}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            id="calls",
        ),
        pytest.param(
            "tool_calls = [{name = 'f', arguments = '{\"x\": '}]",
            '<tool_call>\n{"name": "f", "arguments": {"x": }\n</tool_call>',
            id="malformed-arguments",
        ),
        pytest.param("raw = '<think>'", "<think>", id="raw"),
    ],
)
def test_what_is_said(script, say, text):
    assert script(f"[[rule]]\n{say}\n").answer(TALK).text == text


@pytest.mark.parametrize(
    ("say", "text"),
    [
        pytest.param("text = 'to {1}'", "to Paris", id="number"),
        pytest.param("text = 'to {city}'", "to Paris", id="name"),
        pytest.param("text = '{0}'", "in Paris", id="whole"),
        pytest.param("text = 'turn {turn}'", "turn 1", id="turn"),
        pytest.param("text = 'a{{1}} { x } {other}'", "a{1} { x } {other}", id="escaped"),
        pytest.param(
            "tool_calls = [{name = 'f', arguments = {a = {b = ['{1}']}}}]",
            '<tool_call>\n{"name": "f", "arguments": {"a": {"b": ["Paris"]}}}\n</tool_call>',
            id="in-arguments",
        ),
    ],
)
def test_captures(script, say, text):
    assert script(f"[[rule]]\nlast = 'in (?P<city>\\w+)'\n{say}\n").answer(TALK).text == text


def test_groups_are_numbered_over_all_patterns(script):
    rules = script("[[rule]]\nsystem = 'a (\\w+)'\nlast = '(\\w+),'\ntext = '{1} {2}'\n")
    assert rules.answer(TALK).text == "cook Paris"


def test_a_capture_is_quoted_in_arguments(script):
    rules = script("[[rule]]\nlast = '(.*)'\ntool_calls = [{name = 'f', arguments = {a = '{1}'}}]\n")
    said = rules.answer([Message(role="user", content='say "hi"\\')]).text
    assert r'{"a": "say \"hi\"\\"}' in said


def test_end_false_goes_on_freely(script):
    assert script("[[rule]]\ntext = 'a'\n").answer(TALK).end
    assert not script("[[rule]]\ntext = 'a'\nend = false\n").answer(TALK).end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("rule = ?", ["line 1"], id="no-toml"),
        pytest.param("", ["rule"], id="no-rules"),
        pytest.param("x = 1\nrule = []", ["x"], id="unknown-table"),
        pytest.param("[[rule]]\ntext = 'a'\n[[rule]]\ntxt = 'a'\n", ["rule 2", "txt"], id="unknown-key"),
        pytest.param("[[rule]]\ntext = 1\n", ["rule 1", "text"], id="wrong-type"),
        pytest.param("[[rule]]\ntool_calls = [{nme = 'f'}]\n", ["rule 1", "tool_calls[0]"], id="wrong-call"),
        pytest.param("[[rule]]\nname = 'hello'\nturn = 1\n", ["rule 1 (hello)", "says nothing"], id="says-nothing"),
        pytest.param("[[rule]]\nlast = '('\ntext = 'a'\n", ["rule 1", "last", "regular expression"], id="bad-regex"),
        pytest.param("[[rule]]\nlast = '(a)'\ntext = '{2}'\n", ["rule 1", "{2}", "1 group"], id="bad-capture"),
        pytest.param("[[rule]]\ntext = 'a'\nrepeat = 0\n", ["rule 1", "repeat"], id="bad-repeat"),
        pytest.param("[[rule]]\ntext = 'ab'\nrepeat = 5000001\n", ["rule 1", "repeat"], id="absurd-repeat"),
        pytest.param("[[rule]]\nraw = 'a'\nrepeat = 9000000000000000000\n", ["rule 1", "repeat"], id="huge-repeat"),
        pytest.param("[[rule]]\ntext = 'a'\nlast_role = 'zz'\n", ["rule 1", "last_role", "'zz'", "tool"], id="role"),
        pytest.param("[[rule]]\ntext = 'a'\nlast_role = 'assistant'\n", ["rule 1", "last_role"], id="never-last"),
        pytest.param("[[rule]]\ntext = 'a'\nturn = 0\n", ["rule 1", "turn"], id="bad-turn"),
        pytest.param("[[rule]]\ntext = 'a'\nraw = 'b'\n", ["rule 1", "raw"], id="raw-and-text"),
        pytest.param(
            "[[rule]]\ntool_calls = [{name = 'f', arguments = {d = 2020-01-01}}]\n",
            ["rule 1", "tool_calls", "date"],
            id="no-json",
        ),
    ],
)
def test_a_bad_script_is_named(script, tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        script(text)
    assert [word for word in [str(tmp_path / "s.toml"), *words] if word not in str(caught.value)] == []


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.toml"):
        load(tmp_path / "gone.toml")


def test_the_documented_example_is_a_script(script):
    text = (Path(__file__).parents[2] / "docs/policy-tiny.md").read_text(encoding="utf-8")
    rules = script(text.split("```toml\n")[1].split("```")[0])
    said = rules.answer([Message(role="user", content="What is the weather in Oslo?")]).text
    assert said.startswith("<think>They want to know about Oslo.</think>Let me look.<tool_call>")
