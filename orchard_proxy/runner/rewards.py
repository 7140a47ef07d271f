"""What a grader said, as numbers. Pure. Anything that is not a finite number is a RewardError, never a 0.0."""

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from orchard_proxy.errors import OrchardError
from orchard_proxy.runner.tasks import AnswerGrade

_NUMBER = re.compile(r"(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_PLAIN = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
"""A reward as a grader prints it."""
MAIN = "reward"
"""The name of the reward that counts, among several."""


class RewardError(OrchardError):
    """A grader ended without a reward that can be read. `code` goes into the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def of_answer(grade: AnswerGrade, answer: str | None) -> float:
    """Compare an answer with the expected one."""
    if answer is None:
        return 0.0
    if grade.match == "number":
        found = _NUMBER.findall(answer)
        wanted = _decimal(grade.expected)
        return float(bool(found) and wanted is not None and _decimal(found[-1]) == wanted)
    return float(normalised(answer) == normalised(grade.expected))


def normalised(answer: str) -> str | Decimal:
    """Fold what does not change an answer: case, width, blanks, one final full stop, the spelling of a number."""
    text = " ".join(unicodedata.normalize("NFKC", answer).casefold().split())
    text = text.removesuffix(".")
    number = _decimal(text)
    return text if number is None else number


def is_number(text: str) -> bool:
    """Say whether a text is a number as answers are compared."""
    return _decimal(text) is not None


def _decimal(text: str) -> Decimal | None:
    if not _NUMBER.fullmatch(text.strip()):
        return None
    try:
        return Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None


def of_stdout(stdout: bytes) -> float:
    """Read the last line that is not blank as a number."""
    lines = [line for line in stdout.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise RewardError("no_reward", "the grade command printed nothing; its last line must be the reward")
    return _finite(lines[-1].strip(), "the last line of the grade command")


def of_files(reward_json: bytes | None, reward_txt: bytes | None) -> dict[str, float]:
    """Read Harbor's reward files: json wins, names → numbers; txt is one number, called `reward`."""
    if reward_json is not None:
        return _of_json(reward_json)
    if reward_txt is None:
        raise RewardError("no_reward", "test.sh wrote neither /logs/verifier/reward.json nor reward.txt")
    text = reward_txt.decode(errors="replace").strip()
    if not text:
        raise RewardError("no_reward", "/logs/verifier/reward.txt is empty")
    return {MAIN: _finite(text, "/logs/verifier/reward.txt")}


def _of_json(data: bytes) -> dict[str, float]:
    where = "/logs/verifier/reward.json"
    if not data.strip():
        raise RewardError("no_reward", f"{where} is empty")
    try:
        read = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardError("bad_reward", f"{where} is not JSON: {error}") from error
    if not isinstance(read, dict) or not read:
        raise RewardError("bad_reward", f"{where} must be an object of numbers")
    return {_name(name, where): _value(name, value, where) for name, value in read.items()}


def _name(name: str, where: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RewardError("bad_reward", f"{where}: {name[:80]!a} is no name: it is not Unicode") from error
    return name


def _value(name: str, value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        told = f"{value:g}" if isinstance(value, float) else type(value).__name__
        raise RewardError("bad_reward", f"{where}: {name[:80]} is not a finite number ({told})")
    return number


def main_of(rewards: dict[str, float]) -> float:
    """Return the reward that counts: the one called `reward`, the only one, else the mean of all."""
    if MAIN in rewards:
        return rewards[MAIN]
    return mean(list(rewards.values()))


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite numbers, which is finite, however large they are."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _finite(text: str, where: str) -> float:
    if not _PLAIN.fullmatch(text):
        raise RewardError("bad_reward", f"{where} is {text[:80]!r}, not a number")
    value = float(text)
    if not math.isfinite(value):
        raise RewardError("bad_reward", f"{where} is {text[:80]!r}, not a finite number")
    return value
