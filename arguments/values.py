"""Converts flag values between text and the type of their annotation, without `eval`."""

import ast
import math
import re
import shlex
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, NewType, Union, cast, get_args, get_origin

from megatron_moe.config.registry import ComponentRegistry

FilePath = NewType("FilePath", str)
"""File or folder that a run reads or writes, maybe after a prefix such as `hf:`; empty: none."""
DataPrefix = NewType("DataPrefix", str)
"""Prefix of dataset files, or the blend weight of the prefix that follows."""
_TEXTS = (str, FilePath, DataPrefix)
LayerPattern = int | tuple[int, ...]
"""Interval n (every n-th layer), or one number per layer. Text form: an expression such as `([0]*3+[1]*58)`."""

_LONGEST_EXPRESSION = 50_000
_LONGEST_PATTERN = 10_000
_LARGEST_FP32 = 3.4028234663852886e38
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_PLAIN = re.compile(r"(?!-+$)[A-Za-z0-9_./(+-][A-Za-z0-9_./,+()=-]*")
_NULL_WORDS = ("null", "Null", "NULL", "~", "")


def is_number(word: str) -> bool:
    """Whether a text is a number, such as the weight of a prefix in a blend of data sets."""
    try:
        float(word)
    except ValueError:
        return False
    return True


class BadValue(ValueError):
    """Text that cannot be converted to the requested type. The message is a verb phrase to follow "--flag TEXT"."""


def strip_quotes(text: str) -> str:
    """Removes one level of matching quotes, which nested shells and YAML leave in the text."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def parse(annotation: Any, texts: Sequence[str]) -> Any:
    """Converts the words given to a flag to the type `annotation`.

    Raises:
        BadValue: the words are not a value of this type.
    """
    kind = without_none(annotation)
    words = [strip_quotes(text) for text in texts]
    if kind == LayerPattern:
        return layer_pattern(words[0] if len(words) == 1 else f"[{','.join(words)}]")
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), words)
    if len(words) != 1:
        raise BadValue(f"takes one value, not {len(words)}")
    return _scalar(kind, words[0])


def split_words(text: str) -> list[str]:
    """Splits a text into words as a shell does.

    Raises:
        BadValue: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError:
        raise BadValue("has a quote that is not closed") from None


def check_bounds(value: object, least: float | None, below: float | None) -> None:
    """Raises `BadValue` unless `value`, or each number of a tuple, is >= `least` and < `below`. None means no bound."""
    for number in value if isinstance(value, tuple) else (value,):
        if least is not None and number < least:
            raise BadValue(f"is less than {least:g}")
        if below is not None and number >= below:
            raise BadValue(f"is not less than {below:g}")


def words_of(annotation: Any, value: object) -> list[str]:
    """Command-line words that `parse` converts to `value`."""
    if isinstance(value, tuple):
        if without_none(annotation) != LayerPattern:
            return [_word(item) for item in value]
        runs = [f"[{entry}]*{len(list(same))}" for entry, same in groupby(value)]  # such as ([0]*3+[1]*58)
        return ["(" + "+".join(runs) + ")" if runs else "[]"]
    return [_word(value)]


def _word(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'"{text}"' if strip_quotes(text) != text else text


def yaml_value(annotation: Any, value: object) -> str:
    """Formats a value as YAML that `words_of` and `parse` read back."""
    if value is None:
        return "null"
    words = [yaml_scalar(word) for word in words_of(annotation, value)]
    return f"[{', '.join(words)}]" if is_list(annotation) else words[0]


def yaml_scalar(word: str) -> str:
    """YAML scalar for a word: plain if unambiguous, otherwise in double quotes."""
    if _PLAIN.fullmatch(word) and word not in _NULL_WORDS:
        return word
    return '"' + "".join(map(_character, word.replace("$", "$$"))) + '"'


def _character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def type_name(annotation: Any) -> str:
    """Readable name of a type, such as `int`, `a | b | c`, `float ...` (a list of floats) or `layer pattern`."""
    kind = without_none(annotation)
    if kind is bool:
        return "switch"
    if kind == LayerPattern:
        return "layer pattern"
    if get_origin(kind) is tuple:
        items = get_args(kind)
        return f"{type_name(items[0])} ..." if items[-1] is Ellipsis else " ".join(type_name(item) for item in items)
    if allowed_values(kind):
        return " | ".join(allowed_values(kind))
    names = {str: "text", FilePath: "path", DataPrefix: "path"}
    return names.get(kind) or str(kind.__name__)


@dataclass(frozen=True)
class RefusedValues:
    """Annotation of a flag's type: values of Megatron-LM that will not be available."""

    names: tuple[tuple[str, str], ...]
    """Pairs of (value, verb phrase with the reason and the alternative, whose subject is the value)."""


def allowed_values(annotation: Any) -> tuple[str, ...]:
    """Allowed values of a `Literal` or of `Annotated[str, registry]`, or of the elements of a tuple of them; empty for
    other types."""
    kind = without_none(annotation)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return tuple(map(str, _allowed(kind)))


def _allowed(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Annotated:
        registries = [each for each in get_args(kind) if isinstance(each, ComponentRegistry)]
        return tuple(name for registry in registries for name in registry.names())
    return get_args(kind) if get_origin(kind) is Literal else ()


def path_kind(annotation: Any) -> Any:
    """`FilePath` or `DataPrefix` if a flag of this type takes one or several of them, otherwise None."""
    kind = without_none(annotation)
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return item if item in (FilePath, DataPrefix) else None


def is_optional(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)


def is_list(annotation: Any) -> bool:
    """Whether a flag of this type takes several words. A layer pattern counts as one word."""
    kind = without_none(annotation)
    return get_origin(kind) is tuple and kind != LayerPattern


def without_none(annotation: Any) -> Any:
    """Removes None from an optional type."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    return Union[tuple(member for member in get_args(annotation) if member is not types.NoneType)]  # noqa: UP007


def _tuple(items: tuple[Any, ...], words: Sequence[str]) -> tuple[Any, ...]:
    parts = [part for word in words for part in word.strip("[]()").replace(",", " ").split()]
    if items[-1] is Ellipsis:
        parts = list(words) if items[0] in _TEXTS else parts
        return tuple(_entry(items[0], strip_quotes(part), parts) for part in parts)
    if len(parts) != len(items):
        raise BadValue(f"takes {len(items)} values, not {len(parts)}")
    return tuple(_entry(item, part, parts) for item, part in zip(items, parts, strict=True))


def _entry(kind: Any, word: str, words: Sequence[str]) -> Any:
    """Converts `word`, an element of `words`. If there are several elements, the error message names the word."""
    try:
        return _scalar(kind, word)
    except BadValue as problem:
        raise problem if len(words) == 1 else BadValue(f"has {word}, which {problem}") from None


def _scalar(kind: Any, word: str) -> Any:
    if allowed := _allowed(kind):
        refused = {name: why for each in get_args(kind) if isinstance(each, RefusedValues) for name, why in each.names}
        if word in refused and word not in allowed:
            raise BadValue(refused[word])
        return _choice(allowed, word)
    if kind is bool:
        return _switch(word)
    if kind in _TEXTS:
        return word
    return _number(kind, word)


def _choice(choices: tuple[Any, ...], word: str) -> Any:
    for choice in choices:
        if str(choice) == word:
            return choice
    alike = [choice for choice in choices if str(choice).lower() == word.lower()]
    if len(alike) == 1:
        return alike[0]
    raise BadValue(f"is not one of {', '.join(str(choice) for choice in choices)}")


def _switch(word: str) -> bool:
    if word.lower() in _TRUE:
        return True
    if word.lower() in _FALSE:
        return False
    raise BadValue("takes no value, or true or false")


def is_off(words: Sequence[str]) -> bool:
    """Whether the words given to a switch are a single `false`, `no` or `off`."""
    return len(words) == 1 and words[0].lower() in _FALSE


def _number(kind: Callable[[str], int | float], word: str) -> int | float:
    try:
        value = kind(word)
        finite = math.isfinite(value)
    except ValueError:
        raise BadValue("is not an integer" if kind is int else "is not a number") from None
    except OverflowError:  # an integer larger than the largest float
        finite = False
    if not finite:
        raise BadValue("is not a finite number")
    if kind is float and abs(value) > _LARGEST_FP32:
        raise BadValue(f"is larger than {_LARGEST_FP32:g}, the largest fp32 number")
    return value


def layer_pattern(expression: str) -> LayerPattern:
    """Evaluates an expression of integers, lists, `+`, `*` and parentheses to an integer or a tuple.

    Raises:
        BadValue: the expression contains anything else, a number above 10,000, or a list of more than 10,000 elements.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise BadValue(f"is longer than {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _calculate(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        if isinstance(problem, BadValue):
            raise
        raise BadValue("is not a layer pattern such as 2 or ([0]*3+[1]*58)") from None
    return value if isinstance(value, int) else tuple(value)


def _calculate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            _bounded(value)
            return value
        case ast.List(elts=entries):
            numbers = [_calculate(entry) for entry in entries]
            if not all(isinstance(number, int) for number in numbers):
                raise BadValue("has a nested list")
            return cast(list[int], numbers)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            return _apply_operator(_calculate(left), operator, _calculate(right))
    raise BadValue("may contain only integers, lists, +, * and parentheses")


def _apply_operator(left: int | list[int], operator: ast.operator, right: int | list[int]) -> int | list[int]:
    result: int | list[int]
    match left, operator, right:
        case int(), ast.Add(), int():
            result = left + right
        case int(), ast.Mult(), int():
            result = left * right
        case list(), ast.Add(), list():
            result = left + right
        case (list() as entries, ast.Mult(), int() as times) | (int() as times, ast.Mult(), list() as entries):
            _bounded(len(entries) * times)
            result = entries * times
        case _:
            raise BadValue("mixes types: lists can be added to lists and multiplied by numbers")
    _bounded(result if isinstance(result, int) else len(result))
    return result


def _bounded(number: int) -> None:
    if number > _LONGEST_PATTERN:
        raise BadValue(f"exceeds {_LONGEST_PATTERN}")
