"""Numbers and texts that no column holds, from the journal to an export."""

import json

import pytest
from derive_kit import Scribe, calls_of, vllm_answer

from orchard_proxy.export import source, writer
from orchard_proxy.export.validate import validate
from orchard_proxy.record import bounds, deriver
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.schema.columns import CALLS, ROLLOUTS
from orchard_proxy.schema.packed import unpack_ids
from orchard_proxy.schema.records import CallEvidence, Choice, Usage

ATTEMPT = next(column for column in ROLLOUTS if column.name == "attempt")
STATUS = next(column for column in CALLS if column.name == "http_status")


@pytest.mark.parametrize(
    ("column", "value", "fits"),
    [
        pytest.param(ATTEMPT, 2**31 - 1, 2**31 - 1, id="largest"),
        pytest.param(ATTEMPT, 2**31, 2**31 - 1, id="one-more"),
        pytest.param(ATTEMPT, -(2**70), -(2**31), id="far-below"),
        pytest.param(STATUS, 2**31, None, id="null-where-it-may-be"),
    ],
)
def test_a_number_fits_its_column(column, value, fits):
    assert column.fit(value) == fits


def test_evidence_names_what_does_not_fit():
    read = CallEvidence(
        choices=[Choice(index=2**70, finish_reason="\ud800")], usage=Usage(prompt_tokens=2**70), model="é\ud800"
    )
    fitted = bounds.evidence(read)
    assert (fitted.choices[0].index, fitted.usage.prompt_tokens) == (2**31 - 1, None)
    assert (fitted.choices[0].finish_reason, fitted.model) == ("\\ud800", "é\\ud800")
    assert (fitted.problems, fitted.choices[0].problems) == (["number_out_of_range"],) * 2
    assert fitted.rejected


def test_evidence_that_fits_is_unchanged():
    read = CallEvidence(choices=[Choice(index=3, finish_reason="stop")], model="日本")
    assert bounds.evidence(read) == read


def odd_answer(**members: object) -> bytes:
    said = json.loads(vllm_answer([1, 2], [3]))
    said["choices"][0].update(members)
    return json.dumps(said).encode()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(odd_answer(index=2**40), id="index-int32"),
        pytest.param(odd_answer(index=2**63), id="index-int64"),
        pytest.param(odd_answer(index=2**80), id="index-beyond-msgpack"),
        pytest.param(odd_answer(finish_reason="\ud800"), id="half-a-pair"),
        pytest.param(
            vllm_answer([1, 2], [3]).replace(b'"completion_tokens": 1', b'"completion_tokens": 1' + b"0" * 60),
            id="usage",
        ),
        pytest.param(vllm_answer([1, 2], [3]).replace(b'"model": "m"', b'"model": "\\ud800"'), id="model"),
    ],
)
def test_one_odd_call_stops_neither_derivation_nor_export(tmp_path, answer):
    data, out = tmp_path / "data", tmp_path / "out"
    scribe = Scribe(data)
    scribe.rollout("r", attempt=2**31)
    odd = scribe.begin("r")
    scribe.answer(odd, answer)
    scribe.end(odd)
    scribe.call("r", [7], [8, 9])
    scribe.finish("r", version=2**64 - 1, rewards={"a": 1.0})
    deriver.derive(data)
    assert [unpack_ids(call.choices[0].token_ids) for call in calls_of(data)][1] == [8, 9]
    with Catalog.open(data) as catalog:
        assert catalog.rollout("r").attempt == 2**31 - 1
    writer.write(source.items(data), out)
    report = validate(out)
    assert (report.valid, report.counts["calls"]) == (True, 2), report.breaches


def test_an_odd_rollout_is_named(tmp_path, caplog):
    Scribe(tmp_path).rollout("the-odd-one", attempt=2**63)
    deriver.derive(tmp_path)
    assert "rollout the-odd-one: ['attempt'] does not fit" in caplog.text
