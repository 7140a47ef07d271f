"""Whatever a rollout looks like, what the writer publishes the validator accepts, and both count alike."""

import tempfile
from pathlib import Path
from typing import Any

from export_kit import INFRA, Recording, choice
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.export.dataset import Dataset
from orchard_proxy.export.validate import validate
from orchard_proxy.export.writer import write
from orchard_proxy.schema.enums import Delivery, LogprobsGrade, Outcome
from orchard_proxy.schema.packed import pack_floats

TOKEN = st.integers(0, 2)
LOGPROB = st.floats(-5, 0, width=32) | st.sampled_from([float("nan"), -0.0, float("-inf")])


@st.composite
def answers(draw: st.DrawFn, index: int) -> Any:
    ids = draw(st.lists(TOKEN, max_size=3))
    kind = draw(st.sampled_from(["plain", "plain", "holes", "no_logprobs"]))
    if not ids:
        return choice(index, [], sampled_tokens=draw(st.integers(0, 3)))
    if kind == "holes":
        return choice(index, ids, logprobs=pack_floats(draw(st.lists(LOGPROB, min_size=len(ids), max_size=len(ids)))))
    if kind == "no_logprobs":
        return choice(index, ids, logprobs=b"", logprobs_grade=LogprobsGrade.NONE)
    return choice(index, ids)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, list[Any], dict[str, Any]]:
    prompt = draw(st.none() | st.lists(TOKEN, min_size=1, max_size=6))
    choices = [draw(answers(index)) for index in range(draw(st.integers(0, 2)))]
    if prompt is None:
        choices = [choice(one.index, [], sampled_tokens=2) for one in choices]
    over = {
        "outcome": draw(st.sampled_from([Outcome.COMPLETE] * 4 + list(Outcome))),
        "delivery": draw(st.sampled_from([Delivery.CONFIRMED] * 4 + list(Delivery))),
        "late": draw(st.sampled_from([False, False, False, True])),
        "rejected": draw(st.sampled_from([False, False, False, True])),
    }
    return prompt, choices, over


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.tuples(calls(), st.booleans()), max_size=8), st.booleans())
def test_any_rollout_is_exported_valid(told: list[tuple[Any, bool]], infra: bool) -> None:
    story = Recording("any", failure=INFRA if infra else None)
    history: list[int] = []
    for (more, choices, over), goes_on in told:
        prompt = history + more if more is not None and goes_on else more
        story.call(prompt, *choices, **over)
        if prompt is not None and choices:
            history = prompt + list(memoryview(choices[-1].token_ids).cast("i"))
    with tempfile.TemporaryDirectory() as folder:
        check(story, Path(folder) / "out")


def check(story: Recording, out: Path) -> None:
    written = write([story.item()], out)
    report = validate(out)
    assert report.breaches == []
    assert report.invariant == written.invariant
    assert len(list(Dataset(out).iter_samples())) == written.counts.samples
