"""Which Pythons fit."""

import pytest

from harness_images import python_spec


@pytest.mark.parametrize(
    ("spec", "version", "fits"),
    [
        pytest.param(">=3.10", (3, 10), True, id="least"),
        pytest.param(">=3.10", (3, 9), False, id="too-old-and-not-compared-as-text"),
        pytest.param(">=3.11,<3.14", (3, 13), True, id="range"),
        pytest.param(">=3.11, <3.14", (3, 14), False, id="too-new"),
        pytest.param("==3.12", (3, 12), True, id="exactly"),
        pytest.param(">=3.10,!=3.12", (3, 12), False, id="but-not"),
        pytest.param(">3.10", (3, 10), False, id="greater"),
        pytest.param("<=3.10", (3, 10), True, id="at-most"),
    ],
)
def test_satisfied(spec, version, fits):
    assert python_spec.is_valid(spec)
    assert python_spec.satisfied(spec, version) is fits


@pytest.mark.parametrize("spec", ["", "3.10", "~=3.10", ">=3", ">=3.10,", ">=3.10.2"])
def test_what_is_not_understood(spec):
    assert not python_spec.is_valid(spec)
