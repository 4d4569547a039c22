"""Registries of components: unique names, one-sentence errors, restoration."""

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.functions import ScoreFunction
from megatron_moe.config.registry import REGISTRIES, ComponentRegistry, RegistrationProblem, resolve


def test_entries_are_found_by_name_in_order_of_registration():
    colours = ComponentRegistry[int]("colour")
    assert colours.register("red", 1) == 1
    colours.register("blue", 2)
    assert colours.names() == ("red", "blue") and colours.get("blue") == 2 and "red" in colours and "x" not in colours


def test_a_name_is_registered_once():
    colours = ComponentRegistry[int]("colour")
    colours.register("red", 1)
    with pytest.raises(RegistrationProblem, match="the colour 'red' is registered twice; choose another name"):
        colours.register("red", 1)


def test_an_unknown_name_is_reported_with_the_known_ones():
    colours = ComponentRegistry[int]("colour")
    with pytest.raises(RegistrationProblem, match=r"'pink' is not a registered colour \(registered: none\)") as caught:
        colours.get("pink")
    assert caught.value.code is ExitCode.CONFIG
    colours.register("red", 1)
    with pytest.raises(RegistrationProblem, match=r"\(registered: red\); --import the file that registers it"):
        colours.get("pink")


def test_entries_of_a_block_are_removed_after_an_error_too():
    colours = ComponentRegistry[int]("colour")
    colours.register("red", 1)
    with pytest.raises(KeyError), colours.restored():
        colours.register("blue", 2)
        raise KeyError
    assert colours.names() == ("red",)


def test_every_kind_has_one_registry():
    assert len({registry.kind for registry in REGISTRIES}) == len(REGISTRIES)


def test_texts_are_resolved_and_other_entries_are_returned():
    assert resolve("math:sqrt")(4.0) == 2.0
    assert resolve(len) is len


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package.file:f", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("math:nothing", "AttributeError: module 'math' has no attribute 'nothing'"),
        (":name", "ValueError: Empty module name"),
    ],
)
def test_an_object_that_cannot_be_imported_is_reported_in_one_sentence(target, reason):
    with pytest.raises(RegistrationProblem) as caught:
        ScoreFunction(function=target).bound(())
    assert caught.value.code is ExitCode.CONFIG
    assert str(caught.value) == (
        f"the registered object '{target}' cannot be imported ({reason}); correct the file that registers it: "
        "'package.module:name', or the object itself"
    )
