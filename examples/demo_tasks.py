"""The tasks of `make demo`, as the JSON lines that `orchard run` takes: docs/running.md has all fields.

`questions` are for SmolLM2-135M, which is too small to use a tool on being told to: it sees ten worked examples first,
as turns of the conversation, and copies their form. `repair` is a git repository with a test that fails.
"""

import json
from pathlib import Path

REPAIR = Path(__file__).resolve().parent / "repair"
SCRIPT = REPAIR / "script.toml"
FILES = {"ada.txt": "36\n", "bob.txt": "Nairobi\n", "pear.txt": "pear\n" * 14, "plum.txt": "plum\n" * 230}
QUESTIONS = {  # question: the answer that earns reward 1
    "How much is 12 + 119?": "131",
    "How much is 81 - 47?": "34",
    "How much is 256 + 389?": "645",
    "How much is 144 / 12?": "12",
    "What does ada.txt say?": "36",
    "What does bob.txt say?": "Nairobi",
    "How many lines has pear.txt?": "14",
    "How many lines has plum.txt?": "230",
}
WORKED = [  # (question, thought, command, what it prints, answer)
    ("How much is 6 + 7?", "I compute it.", "expr 6 + 7", "13", "13"),
    ("What does tom.txt say?", "I read the file.", "cat tom.txt", "58", "58"),
    ("How much is 15 + 21?", "I compute it.", "expr 15 + 21", "36", "36"),
    ("How many lines has ash.txt?", "I count the lines.", "wc -l ash.txt", "75 ash.txt", "75"),
    ("How much is 90 - 18?", "I compute it.", "expr 90 - 18", "72", "72"),
    ("What does oak.txt say?", "I read the file.", "cat oak.txt", "green", "green"),
    ("How much is 56 / 8?", "I compute it.", "expr 56 / 8", "7", "7"),
    ("How many lines has fir.txt?", "I count the lines.", "wc -l fir.txt", "12 fir.txt", "12"),
    ("How much is 305 + 16?", "I compute it.", "expr 305 + 16", "321", "321"),
    ("What does elm.txt say?", "I read the file.", "cat elm.txt", "Lima", "Lima"),
]


def questions() -> list[dict]:
    """Return one task a question; the harness finds the worked examples in examples.json."""
    files = {**FILES, "examples.json": json.dumps(_conversation())}
    return [
        {"task_id": question, "prompt": f"Question: {question}", "files": files, "expected_answer": answer}
        for question, answer in QUESTIONS.items()
    ]


def repair() -> list[dict]:
    """Return the repository with a failing test; graded by the tests as they were, whatever the agent made of them."""
    files = {name: (REPAIR / name).read_text() for name in ("stats.py", "test_stats.py")}
    name = "git config user.name agent && git config user.email agent@sandbox"
    return [
        {
            "task_id": "repair",
            "prompt": "A test of this repository fails. Find out why, mend it, and commit.",
            "files": files,
            # Python takes bytecode for current while time (in seconds) and size of the source stay, as in a quick mend.
            "env": {"PYTHONDONTWRITEBYTECODE": "1"},
            # Tests that pass already would prove nothing, so the set-up insists that they fail.
            "setup": f"git init -q && {name} && git add . && git commit -qm Statistics && ! python3 -m unittest",
            "grade": {
                "command": "git show --stat --oneline && python3 -m unittest",
                "files": {"test_stats.py": files["test_stats.py"]},
            },
        }
    ]


def write(tasks: list[dict], path: Path) -> Path:
    """Write tasks as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def _conversation() -> list[dict[str, str]]:
    turns = []
    for question, thought, command, printed, answer in WORKED:
        action = f"Thought: {thought}\nAction: bash[{command}]"
        texts = (f"Question: {question}", action, f"Observation: {printed}", f"Answer: {answer}")
        turns += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return turns
