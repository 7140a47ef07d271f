"""The demo's agent against a tiny server that says what a script says: real SDK, real sockets, real tokens."""

import asyncio

import openai
import pytest
import react_agent

from orchard_proxy.policy import tiny_server

SCRIPT = r"""
[[rule]]
last = 'How much is (.*)\?'
text = "Thought: I use the calculator.\nAction: calculator[{1}]"

[[rule]]
last = 'What is the age of Ada\?'
text = "Thought: hm.\nAction: lookup[the age of ADA]\nObservation: 99"

[[rule]]
last = 'go round'
text = "Action: dance[now]"

[[rule]]
last = 'Observation: there is no tool'
text = "Action: dance[again]"

[[rule]]
last = 'Observation: (.*)'
text = "Answer: {1}."

[[rule]]
last = 'Just talk'
text = "I will not use any tool."
"""


@pytest.fixture
async def ask(tmp_path):
    """Return a function that has the agent answer a question; it also counts the model's turns."""
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    async with tiny_server.running(tiny_server.TinyOptions(script=script)) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:

            async def solve(question, **more):
                return await asyncio.to_thread(react_agent.solve, client, question, model="tiny", **more)

            yield solve


async def test_calculator_then_answer(ask):
    episode = await ask("How much is 12 * 11?")
    assert episode.answer == "132"
    assert episode.turns == [
        "Thought: I use the calculator.\nAction: calculator[12 * 11]",
        "Observation: 132",
        "Answer: 132.",
    ]


async def test_a_lookup_ignores_what_the_model_imagined_to_observe(ask):
    assert (await ask("What is the age of Ada?")).answer == "36"


async def test_no_action_is_a_final_answer(ask):
    episode = await ask("Just talk")
    assert (episode.answer, len(episode.turns)) == ("I will not use any tool", 1)


@pytest.mark.parametrize("max_turns", [1, 2, 4])
async def test_turns_are_bounded(ask, max_turns):
    episode = await ask("Please go round", max_turns=max_turns)
    assert sum(turn.startswith("Action") for turn in episode.turns) == max_turns


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 11", "132"),
        ("144 / 12", "12"),
        ("(81 - 47) * -2", "-68"),
        ("1 / 3", "0.3333"),
        (" 2 + 2", "4"),
        ("1 / 0", "not a calculation"),
        ("1e308 * 10", "not a calculation"),
        ("2 ** 9999999", "not a calculation"),
        ("__import__('os').getcwd()", "not a calculation"),
        ("'a' * 3", "not a calculation"),
        ("True + 1", "not a calculation"),
        ("", "not a calculation"),
        ("9" * 5000, "not a calculation"),
        ("(" * 5000, "not a calculation"),
        ("12 times 11", "not a calculation"),
        ("\0", "not a calculation"),
    ],
    ids=lambda value: value[:20],
)
def test_the_calculator_computes_numbers_and_nothing_else(expression, value):
    assert react_agent.calculate(expression) == value


@pytest.mark.parametrize(
    ("name", "fact"),
    [("age of Ada", "36"), ("the Capital of Japan ", "Tokyo"), ("age of Eve", "no fact named age of Eve")],
)
def test_lookup(name, fact):
    assert react_agent.lookup(name) == fact
