import pytest

from orchard_proxy.runner import rewards
from orchard_proxy.runner.rewards import RewardError
from orchard_proxy.runner.tasks import AnswerGrade


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        pytest.param("42", "42", 1.0, id="same"),
        pytest.param("  42.\n", "42", 1.0, id="blanks and a full stop"),
        pytest.param("42.0", "42", 1.0, id="spelling of a number"),
        pytest.param("1,234", "1234", 1.0, id="thousands"),
        pytest.param("1e3", "1000", 1.0, id="exponent"),
        pytest.param("-0", "0", 1.0, id="minus zero"),
        pytest.param("New\n York", "new york", 1.0, id="case and lines"),
        pytest.param("４２", "42", 1.0, id="wide digits"),
        pytest.param("42 apples", "42", 0.0, id="more than the answer"),
        pytest.param("43", "42", 0.0, id="wrong"),
        pytest.param("", "42", 0.0, id="empty"),
        pytest.param(None, "42", 0.0, id="none"),
        pytest.param("1e999999999", "42", 0.0, id="a huge number costs nothing"),
        pytest.param("nan", "42", 0.0, id="nan is a word"),
    ],
)
def test_exact_answers(answer, expected, reward):
    assert rewards.of_answer(AnswerGrade(expected=expected), answer) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("The answer is 42.", 1.0),
        ("12 + 30 = 42", 1.0),
        ("42 or 43", 0.0),
        ("42.00 dollars", 1.0),
        ("x-42", 1.0),
        ("it is -42", 0.0),
        ("none", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(answer, reward):
    assert rewards.of_answer(AnswerGrade(expected="42", match="number"), answer) == reward


@pytest.mark.parametrize(("stdout", "reward"), [(b"0.5", 0.5), (b"log\n1\n\n", 1.0), (b"-3e-1\n", -0.3)])
def test_the_last_line_of_stdout(stdout, reward):
    assert rewards.of_stdout(stdout) == reward


@pytest.mark.parametrize(
    ("stdout", "code"),
    [
        (b"", "no_reward"),
        (b"\n \n", "no_reward"),
        (b"ok", "bad_reward"),
        (b"nan", "bad_reward"),
        (b"inf", "bad_reward"),
        (b"1e999", "bad_reward"),
        (b"1_0", "bad_reward"),
        ("٣".encode(), "bad_reward"),
    ],
)
def test_stdout_that_is_no_reward(stdout, code):
    with pytest.raises(RewardError) as caught:
        rewards.of_stdout(stdout)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("in_json", "in_txt", "read"),
    [
        pytest.param(None, b"1\n", {"reward": 1.0}, id="txt"),
        pytest.param(b'{"reward": 0.25, "style": 1}', b"1", {"reward": 0.25, "style": 1.0}, id="json wins"),
        pytest.param(b'{"a": true, "b": 0}', None, {"a": 1.0, "b": 0.0}, id="bools are numbers"),
    ],
)
def test_harbors_files(in_json, in_txt, read):
    assert rewards.of_files(in_json, in_txt) == read


@pytest.mark.parametrize(
    ("in_json", "in_txt", "code"),
    [
        pytest.param(None, None, "no_reward", id="none"),
        pytest.param(None, b" \n", "no_reward", id="empty txt"),
        pytest.param(b"", b"1", "no_reward", id="an empty json still wins"),
        pytest.param(None, b"nan", "bad_reward", id="nan"),
        pytest.param(None, b"1 1", "bad_reward", id="two numbers"),
        pytest.param(b'{"reward": "1"}', None, "bad_reward", id="text"),
        pytest.param(b'{"reward": NaN}', None, "bad_reward", id="nan in json"),
        pytest.param(b'{"reward": {"a": 1}}', None, "bad_reward", id="nested"),
        pytest.param(b"[1]", None, "bad_reward", id="list"),
        pytest.param(b"{}", None, "bad_reward", id="nothing in it"),
        pytest.param(b"{", None, "bad_reward", id="not json"),
        pytest.param(b"\xff", None, "bad_reward", id="not text"),
        pytest.param(b"[" * 100_000, None, "bad_reward", id="deep"),
        pytest.param(b'{"reward": ' + b'{"a":' * 900 + b"1" + b"}" * 901, None, "bad_reward", id="nested deep"),
        pytest.param(b'{"reward": 1' + b"0" * 400 + b"}", None, "bad_reward", id="400 digits"),
        pytest.param(b'{"reward": 1' + b"0" * 5000 + b"}", None, "bad_reward", id="5000 digits"),
        pytest.param(b'{"\\ud800": 1}', None, "bad_reward", id="a name that is no Unicode"),
    ],
)
def test_harbors_files_without_a_reward(in_json, in_txt, code):
    with pytest.raises(RewardError) as caught:
        rewards.of_files(in_json, in_txt)
    assert caught.value.code == code


def test_the_reward_that_counts():
    assert rewards.main_of({"reward": 0.5, "style": 1.0}) == 0.5
    assert rewards.main_of({"tests": 1.0}) == 1.0
    assert rewards.main_of({"a": 1.0, "b": 0.0}) == 0.5
    assert rewards.main_of({"a": 1e308, "b": 1e308}) == 1e308
