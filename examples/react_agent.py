"""A ReAct agent on the unmodified `openai` SDK: thought, action, observation, answer, all in plain text.

It knows nothing of Orchard. Point OPENAI_BASE_URL at the proxy and every call of it is recorded:

    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=<rollout key>
    python examples/react_agent.py "What is the age of Ada?"

Two tools, calculator and lookup, and no shell. A turn without an action is the final answer, whatever it says. What
the model said goes back to it unchanged, so that each prompt extends the last one token by token.
"""

import ast
import operator
import re
import sys
from dataclasses import dataclass, field

import openai

FACTS = {
    "age of Ada": "36",
    "age of Bob": "11",
    "height of the Oak tower": "120",
    "price of a pear": "4",
    "capital of Japan": "Tokyo",
    "capital of Kenya": "Nairobi",
}
SYSTEM = "Use calculator for numbers and lookup for facts."
SHOTS = [  # (question, tool, its input, what it gives): a small model copies the form from these
    ("How much is 6 * 7?", "calculator", "6 * 7", "42"),
    ("What is the age of Tom?", "lookup", "age of Tom", "58"),
    ("How much is 15 + 21?", "calculator", "15 + 21", "36"),
    ("What is the height of the Ash tower?", "lookup", "height of the Ash tower", "75"),
    ("How much is 90 - 18?", "calculator", "90 - 18", "72"),
    ("How much is 56 / 8?", "calculator", "56 / 8", "7"),
    ("How much is 31 * 4?", "calculator", "31 * 4", "124"),
    ("How much is 305 + 16?", "calculator", "305 + 16", "321"),
]
ACTION = re.compile(r"Action: *(\w+)\[([^\]\n]*)\]")
ANSWER = re.compile(r"Answer: *([^\n]*)")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass
class Episode:
    """What one attempt came to."""

    answer: str
    turns: list[str] = field(default_factory=list)
    """The model's turns and the observations between them."""


def solve(
    client: openai.OpenAI,
    question: str,
    *,
    model: str = "smollm2",
    temperature: float = 1.0,
    max_tokens: int = 64,
    max_turns: int = 4,
    seed: int | None = None,
) -> Episode:
    """Answer a question in at most `max_turns` model calls of `max_tokens` each."""
    messages = [*opening(), {"role": "user", "content": f"Question: {question}"}]
    turns: list[str] = []
    for turn in range(max_turns):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=openai.omit if seed is None else seed + turn,
        )
        said = completion.choices[0].message.content or ""
        turns.append(said)
        action = ACTION.search(said)
        if action is None:
            break
        observation = f"Observation: {use(action[1], action[2])}"
        turns.append(observation)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    return Episode(answer=final_answer(said), turns=turns)


def opening() -> list[dict[str, str]]:
    """Return the system prompt and the worked examples, as turns of a conversation."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question, tool, given, result in SHOTS:
        for user, assistant in (
            (f"Question: {question}", f"Thought: I use the {tool}.\nAction: {tool}[{given}]"),
            (f"Observation: {result}", f"Answer: {result}"),
        ):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages


def final_answer(said: str) -> str:
    """Return what stands behind `Answer:`, or the whole turn where nothing does."""
    answer = ANSWER.search(said)
    return (answer[1] if answer else said).strip().rstrip(".")


def use(tool: str, given: str) -> str:
    """Use a tool; a mistake is an observation, too."""
    if tool == "calculator":
        return calculate(given)
    if tool == "lookup":
        return lookup(given)
    return f"there is no tool {tool}"


def lookup(name: str) -> str:
    """Return the fact of that name."""
    facts = {key.lower(): value for key, value in FACTS.items()}
    return facts.get(name.strip().lower().removeprefix("the "), f"no fact named {name}")


def calculate(expression: str) -> str:
    """Compute a sum of plain numbers; nothing else is evaluated."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.4g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "not a calculation"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            return number
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not a calculation")


if __name__ == "__main__":
    episode = solve(openai.OpenAI(), " ".join(sys.argv[1:]) or "How much is 12 * 11?")
    print(*episode.turns, sep="\n")
    print(f"=> {episode.answer}")
