import json

import pytest
from fakes import twins

from orchard_proxy.engines import repeated
from orchard_proxy.wire import sse


def sources(engine):
    for twin in twins.load(engine):
        for answer in (twin.plain_body, twin.instr_body):
            if answer.startswith(b"{"):
                yield answer
            else:
                events = sse.SseParser().feed(answer)
                yield from (event.data for event in events if event.data and not sse.is_done(event))


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_real_answers_repeat_nothing_and_are_seldom_read_twice(engine):
    answers = list(sources(engine))
    suspected = [answer for answer in answers if repeated._may_repeat(answer, json.loads(answer))]
    assert not any(repeated.has_repeats(answer, json.loads(answer)) for answer in answers)
    assert len(suspected) < len(answers) / 20, len(answers)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"tokens":[1],"tokens":[2]}', True),
        (b'{"a":{"id":1,"\\u0069d":2}}', True),
        (b'{"other":1,"other":2}', False),
        (b'{"a":{"id":1},"b":{"id":2}}', False),
        (b'{"id":1,"id"', False),
        (b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_every_member_is_looked_at(text, found):
    assert repeated.is_repeated(text) is found
