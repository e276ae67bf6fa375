# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821, UP007, UP045 - annotations as users write them
"""A function gets its `CallWrapper`; arguments are checked with messages that quote the caller."""

import functools
import itertools
import random
import sys
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar, Union

import pytest

from nvidia_resiliency_ext.inprocess.param_utils import (
    check_type,
    count_type_in_params,
    enforce_subclass,
    enforce_type,
    enforce_value,
    substitute_param_value,
)


class CallWrapper:
    """Stands in for the wrapper's class: only its name matters here."""


class Other:
    pass


class Below(CallWrapper):
    pass


T = TypeVar("T")


class Box(Generic[T]):
    pass


WRAPPER = CallWrapper()
SUBS = {CallWrapper: WRAPPER}
Alias = Optional[CallWrapper]
ItsName = "CallWrapper"
Endless = "Endless"

MATCHING = [
    CallWrapper,
    Optional[CallWrapper],
    CallWrapper | None,
    Union[int, CallWrapper, None],
    Union[None, "CallWrapper"],
    list[int] | CallWrapper,
    Annotated[CallWrapper, "note"],
    Annotated[CallWrapper | None, "note"],
    Optional[Annotated[CallWrapper, 1]],
    typing.ForwardRef("CallWrapper"),
    "CallWrapper",
    " CallWrapper ",
    "CallWrapper | None",
    "None | CallWrapper",
    "Optional[CallWrapper]",
    "typing.Optional[CallWrapper]",
    "Union[int, CallWrapper]",
    "typing.Union[int, None, CallWrapper]",
    "t.Optional['CallWrapper']",
    "'CallWrapper | None'",
    "Annotated[CallWrapper, 'x', f(3)]",
    "inprocess.CallWrapper",
    "nowhere.to.be.found.CallWrapper | None",
    "'CallWrapper'",
    " | ".join([*(f"list[Missing{n}]" for n in range(40)), "CallWrapper"]),
]

OTHERS = [
    int,
    None,
    Any,
    Optional[Any],
    object,
    Other,
    Below,
    list[int],
    list[CallWrapper],
    dict[str, CallWrapper],
    Callable[..., CallWrapper],
    Callable[[int], str],
    typing.Callable,
    type[CallWrapper],
    tuple[CallWrapper, ...],
    Box[int],
    T,
    Literal["CallWrapper"],
    3,
    [1, 2],
    {"CallWrapper"},
    "",
    "not python [",
    "\0",
    "CallWrapper.inner",
    "CallWrapper()",
    "list[CallWrapper]",
    "Callable[..., CallWrapper]",
    "Callable[[CallWrapper], int] | None",
    "type[CallWrapper]",
    "Literal['CallWrapper'][0]",
    "lambda: CallWrapper",
    "__import__('os').abort()",
    "(" * 5000,
    "Missing | AlsoMissing",
    "Annotated[int, CallWrapper]",
    WRAPPER,
]


@pytest.mark.parametrize("annotation", MATCHING, ids=repr)
def test_annotations_that_mean_the_class(annotation) -> None:
    """The class, its Optional and unions with it match, as objects and as texts."""
    assert check_type(annotation, CallWrapper)


@pytest.mark.parametrize("annotation", OTHERS, ids=lambda each: repr(each).split(" at 0x")[0][:60])
def test_annotations_that_mean_something_else(annotation) -> None:
    """Anything else is no match and no error, whatever it is; no text is run."""
    assert not check_type(annotation, CallWrapper)


def _function(annotation, *, keyword_only, default=None):
    def function(first, second=2, *rest, **options):
        raise NotImplementedError

    import inspect

    kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else None
    parameters = list(inspect.signature(function).parameters.values())
    wanted = inspect.Parameter(
        "wanted",
        kind or inspect.Parameter.POSITIONAL_OR_KEYWORD,
        annotation=annotation,
        default=default,
    )
    parameters.insert(3 if keyword_only else 2, wanted)
    function.__signature__ = inspect.Signature(parameters)
    return function


@pytest.mark.parametrize("keyword_only", [False, True])
def test_substitution_keeps_everything_else(keyword_only) -> None:
    """For any annotation the value goes where it belongs, and all else stays as passed."""
    random.seed(3)
    for annotation in [*MATCHING, *OTHERS]:
        function = _function(annotation, keyword_only=keyword_only)
        args = tuple(random.sample(range(100), random.randint(1, 2)))
        kwargs = {"extra": random.random()} if random.random() < 0.5 else {}
        new_args, new_kwargs = substitute_param_value(function, args, kwargs, SUBS)
        bound = function.__signature__.bind(*new_args, **new_kwargs).arguments
        expected = WRAPPER if any(annotation is each for each in MATCHING) else None
        assert bound["wanted"] is expected
        assert bound["first"] == args[0]
        assert bound["second"] == (args[1] if len(args) > 1 else 2)
        assert bound.get("options", {}) == kwargs


def required(first, wrapper: CallWrapper):
    return first, wrapper


def keyword_only(first, *, wrapper: "CallWrapper | None" = None):
    return first, wrapper


def in_the_middle(first, wrapper: Optional[CallWrapper], last=9):
    return first, wrapper, last


def position_only(wrapper: Alias, first, /):
    return first, wrapper


def by_name_of_alias(first, wrapper: "Alias" = None):
    return first, wrapper


def by_name_of_name(first, wrapper: "ItsName" = None):
    return first, wrapper


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (required, (1,), {}),
        (required, (1, 2), {}),
        (required, (1,), {"wrapper": None}),
        (keyword_only, (1,), {}),
        (keyword_only, (), {"first": 1, "wrapper": 3}),
        (in_the_middle, (1,), {}),
        (in_the_middle, (1,), {"last": 5}),
        (position_only, (None, 1), {}),
        (by_name_of_alias, (1,), {}),
        (by_name_of_name, (1,), {}),
        (functools.partial(required, 1), (), {}),
        (functools.partial(keyword_only, wrapper=None), (1,), {}),
    ],
)
def test_wrapper_arrives(function, args, kwargs) -> None:
    """The function can be called with the result and has the wrapper, passed or not."""
    new_args, new_kwargs = substitute_param_value(function, args, kwargs, SUBS)
    result = function(*new_args, **new_kwargs)
    assert result[:2] == (1, WRAPPER)
    again = substitute_param_value(function, args, kwargs, {CallWrapper: "next"})
    assert function(*again[0], **again[1])[1] == "next"


class Trainer:
    """Callables of other kinds."""

    def __init__(self, wrapper: "CallWrapper | None" = None) -> None:
        self.wrapper = wrapper

    def method(self, wrapper: "CallWrapper" = None):
        return self, wrapper

    @classmethod
    def of_class(cls, wrapper: "CallWrapper" = None):
        return cls, wrapper

    def __call__(self, wrapper: "CallWrapper" = None):
        return self, wrapper


def test_all_kinds_of_callables() -> None:
    """Methods, classes, callable objects and decorated functions get it as well."""
    trainer = Trainer()
    for function in (trainer.method, Trainer.of_class, trainer):
        assert function(*substitute_param_value(function, (), {}, SUBS)[0])[1] is WRAPPER
    assert Trainer(*substitute_param_value(Trainer, (), {}, SUBS)[0]).wrapper is WRAPPER

    @functools.wraps(required)
    def decorated(*args, **kwargs):
        return required(*args, **kwargs)

    args, kwargs = substitute_param_value(decorated, (1,), {}, SUBS)
    assert decorated(*args, **kwargs) == (1, WRAPPER)


def test_names_in_closures_are_known() -> None:
    """A text may name what is local to the enclosing function."""
    Renamed = CallWrapper  # noqa: N806

    def function(wrapper: "Renamed" = None):
        return Renamed, wrapper

    assert substitute_param_value(function, (), {}, SUBS) == ((WRAPPER,), {})


def test_circular_text_is_ignored() -> None:
    """A text that names itself ends, without match and without error."""

    def function(wrapper: "Endless" = None):
        raise NotImplementedError

    assert substitute_param_value(function, (), {}, SUBS) == ((None,), {})


def test_collectors_are_not_replaced() -> None:
    """What collects several arguments is annotated for each of them, and is left alone."""

    def function(*all_of_them: CallWrapper, **named: CallWrapper):
        raise NotImplementedError

    assert substitute_param_value(function, (1, 2), {"a": 3}, SUBS) == ((1, 2), {"a": 3})
    assert count_type_in_params(function, CallWrapper) == 2


def test_builtins_are_called_as_they_are() -> None:
    """What does not tell its parameters gets what was passed."""
    assert substitute_param_value(print, (1,), {}, SUBS)[0] == (1,)
    assert substitute_param_value(dict.fromkeys, ([1],), {}, SUBS)[0][0] == [1]
    assert count_type_in_params(min, CallWrapper) == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [((), {}, "first"), ((1, 2, 3), {}, "too many"), ((1,), {"x": 1}, "'x'")],
)
def test_wrong_arguments_are_a_type_error(args, kwargs, text) -> None:
    """Arguments that do not fit fail as the call would, and name what is wrong."""
    with pytest.raises(TypeError, match=text):
        substitute_param_value(required, args, kwargs, SUBS)


def untyped(first, inprocess_call_wrapper=None):
    raise NotImplementedError


def anything(first, inprocess_call_wrapper: Any = None):
    raise NotImplementedError


def optional_anything(first, *, inprocess_call_wrapper: Optional[Any] = None):
    raise NotImplementedError


def text_of_anything(first, call_wrapper: "Optional[Any]" = None):
    raise NotImplementedError


def text_of_typing_anything(first, call_wrapper: "typing.Any | None" = None):
    raise NotImplementedError


def text_of_unknown_anything(first, call_wrapper: "t.Optional[t.Any]" = None):
    raise NotImplementedError


def required_anything(first, call_wrapper):
    raise NotImplementedError


OPEN = [
    untyped, anything, optional_anything, text_of_anything, text_of_typing_anything,
    text_of_unknown_anything, required_anything,
]  # fmt: skip


@pytest.mark.parametrize("function", OPEN)
def test_open_parameter_with_the_known_name_is_filled(function) -> None:
    """A parameter of that name without type, `Any` or `Optional[Any]` gets it unless passed."""
    args, kwargs = substitute_param_value(function, (1,), {}, SUBS)
    assert WRAPPER in (*args, *kwargs.values())
    name = next(name for name in function.__code__.co_varnames if name.endswith("call_wrapper"))
    args, kwargs = substitute_param_value(function, (1,), {name: None}, SUBS)
    assert WRAPPER not in (*args, *kwargs.values())
    assert count_type_in_params(function, CallWrapper) == 0


def test_known_name_of_another_type_is_left_alone() -> None:
    """A parameter of that name with a type of its own is none of our business."""

    def typed(call_wrapper: Optional[Other] = None, inprocess_call_wrapper: "int | Any" = 3):
        raise NotImplementedError

    assert substitute_param_value(typed, (), {}, SUBS) == ((None, 3), {})
    assert substitute_param_value(untyped, (1,), {}, {Other: 5}) == ((1, None), {})
    assert substitute_param_value(lambda wrapper=None: wrapper, (), {}, SUBS) == ((None,), {})


def test_parameters_are_counted() -> None:
    """Every parameter that means the class counts, in any form."""

    def function(a: CallWrapper, b: "CallWrapper | None", c: int, *, d: Optional[CallWrapper]):
        raise NotImplementedError

    assert count_type_in_params(function, CallWrapper) == 3


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python has no type statement")
def test_type_statement() -> None:
    """An alias made by a type statement means what it stands for; one that fails means nothing."""
    names: dict[str, Any] = {"CallWrapper": CallWrapper}
    exec("type A = CallWrapper | None\ntype B = Missing[0]", names)
    assert check_type(names["A"], CallWrapper)
    assert not check_type(names["B"], CallWrapper)


def test_random_annotations_never_raise() -> None:
    """Any text made of pieces of annotations is read or ignored."""
    random.seed(11)
    pieces = ["CallWrapper", "Optional", "Union", "[", "]", "|", ",", "'", " ", ".", "(", "None",
              "Any", "t", "\n", "é", "*", "1", "lambda:"]  # fmt: skip
    for _ in range(3000):
        text = "".join(random.choices(pieces, k=random.randint(0, 14)))
        if check_type(text, CallWrapper):
            assert "CallWrapper" in text


def test_enforce_type_names_the_argument() -> None:
    """A local of the wrong type is named with what it must be and what it is."""

    def function(timeout, other=None):
        enforce_type("timeout", (timedelta, type(None)))
        enforce_type("other", type(None))

    function(timedelta(1))
    function(None)
    with pytest.raises(TypeError, match=r"timeout must be timedelta or None, not float 3\.5"):
        function(3.5)
    with pytest.raises(TypeError, match="other must be None, not int 1"):
        function(None, 1)
    with pytest.raises(NameError, match="absent"):
        enforce_type("absent", int)


@pytest.mark.parametrize("value", [int, 3, None, "CallWrapper"])
def test_enforce_subclass_names_the_argument(value) -> None:
    """A local that is no class, or not of that kind, is named."""

    def function(factory):
        enforce_subclass("factory", CallWrapper)

    function(Below)
    with pytest.raises(TypeError, match="factory must be a subclass of CallWrapper"):
        function(value)


def test_enforce_value_quotes_the_condition() -> None:
    """The message has the condition as it is written, over several lines too, and its values."""
    short, long = 3, 4
    enforce_value(short < long)
    with pytest.raises(ValueError, match="short > long does not hold: short=3, long=4"):
        enforce_value(short > long)
    with pytest.raises(ValueError, match=r"itertools\.count is None or long < short < 7 "):
        enforce_value(
            itertools.count is None
            or long < short
            < 7
        )  # fmt: skip


def test_enforce_value_without_source() -> None:
    """Where the source cannot be read the message names the place."""
    code = compile("def check(x):\n    enforce_value(x > 3)\n", "<nowhere>", "exec")
    names: dict[str, Any] = {"enforce_value": enforce_value}
    exec(code, names)
    with pytest.raises(ValueError, match=r"check\(\) \(<nowhere>:2\)"):
        names["check"](1)
