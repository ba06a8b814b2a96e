"""Names of methods, their options, and the checks of options."""

from __future__ import annotations

import math

import pytest

from scalelong.scaling.constant import SkipSize
from scalelong.scaling.registry import METHODS, ScalingConfig

IMAGES = [SkipSize(channels=16), SkipSize(channels=32), SkipSize(channels=32)]


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("cs_reverse", {}, ValueError, r"scaling\.method: unknown 'cs_reverse'; did you mean 'cs_reversed'\?"),
        ("cs", {"kappa": 1.7}, ValueError, r"scaling\.kappa: .*got 1\.7; pass allow_amplify=True"),
        ("cs", {"kappa": 0}, ValueError, r"scaling\.kappa: must be in \(0, 1\], got 0"),
        ("cs", {"kappa": math.nan}, ValueError, r"scaling\.kappa"),
        ("cs", {"kappa": "big"}, TypeError, r"scaling\.kappa: must be a number .*'big'"),
        ("cs", {"reduction": 4}, TypeError, r"scaling\.reduction: 'cs' has no such option.*kappa, allow_amplify"),
        ("rsqrt2", {"kappa": 0.5}, TypeError, r"scaling\.kappa: 'rsqrt2' has no such option.*no options"),
        (
            "ls",
            {"module": "sse"},
            ValueError,
            r"scaling\.module: unknown 'sse'; did you mean 'se'\?",
        ),
        ("ls", {"activation": "gelu"}, ValueError, r"scaling\.activation"),
        ("ls", {"reduction": 0}, ValueError, r"scaling\.reduction: .*got 0"),
        ("ls", {"axis": "width"}, ValueError, r"scaling\.axis"),
        ("ls", {"shared": "yes"}, TypeError, r"scaling\.shared"),
        ("ls", {"start": 1.0}, ValueError, r"scaling\.start: must be a number between 0 and 1, got 1\.0; omit it"),
        ("ls", {"start": "near"}, ValueError, r"scaling\.start: must be a number .*got 'near'"),
        ("cs", {"start": 0.9}, TypeError, r"scaling\.start: 'cs' has no such option"),
    ],
)
def test_bad_options_are_refused_by_name(method, options, error, message) -> None:
    with pytest.raises(error, match=message):
        ScalingConfig.create(method, **options)


def test_amplifying_is_possible_when_asked_for() -> None:
    config = ScalingConfig.create("cs", kappa=1.1, allow_amplify=True)
    assert config.build(IMAGES).current() == pytest.approx([1, 1.1, 1.21])


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_are_valid_and_survive_json(method: str) -> None:
    config = ScalingConfig.create(method)
    assert config.options == METHODS[method].defaults
    assert ScalingConfig.from_json(config.to_json()) == config


def test_options_are_those_of_the_builder_and_its_defaults() -> None:
    assert METHODS["none"].defaults == {}
    assert METHODS["cs"].defaults == {"kappa": 0.7, "allow_amplify": False}
    assert METHODS["stable_tau"].defaults == {"tau": 0.1}
    assert METHODS["ls"].defaults == {
        "shared": True, "reduction": 16, "module": "se", "activation": "relu", "axis": "auto", "start": None,
    }  # fmt: skip


def test_a_config_prints_what_was_chosen() -> None:
    assert str(ScalingConfig.create("none")) == "none"
    assert str(ScalingConfig.create("cs", kappa=0.5)) == "cs(kappa=0.5)"
    assert str(ScalingConfig.create("cs", kappa=2.0, allow_amplify=True)) == "cs(kappa=2.0, allow_amplify=True)"
