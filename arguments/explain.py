"""Questions about flags: `--help`, `--help GROUP`, `--help all`, `--help --flag`, `--find WORD`."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from arguments.deprecated import old_names
from arguments.errors import FlagErrors, Problem
from arguments.flag import Flag, docstrings
from arguments.flags import Registry, group_classes, normal
from arguments.parser import near, unknown_flag
from arguments.recipes import recipe_files
from arguments.recognised import find_recognised, recognised_flags
from arguments.values import choices, describe, words_of
from megatron_moe.config.run import RunPlan

_WIDTH = 120
_NAME_COLUMN = 34
_FRONT = """\
Pretrains Mixture-of-Experts language models. One command line of Megatron-style flags describes a run.

  python pretrain_moe.py --recipe quickstart --train-iters 500 --override-opt_param-scheduler
  torchrun --nproc-per-node 8 pretrain_moe.py --config my.yaml --run-dir runs/mine
  srun python pretrain_moe.py --config my.yaml --lr 3e-4
  python pretrain_moe.py --recipe quickstart --print-config > my.yaml
"""
_POINTERS = """\
--help GROUP, --help all, --help --lr explain more; --find WORD searches; every switch has --x and --no-x."""
_DOCUMENT_HEAD = """\
# Flags

Made by `python tools/docs_gen.py flags` from `arguments/groups/`. Every switch `--x` also has `--no-x`, and
underscores may stand for dashes. Later wins: defaults, the recipe, files from left to right, the command line.
"""
_RECOGNISED_HEADS = MappingProxyType(
    {
        False: ("Names without effect", "Flags of Megatron-LM that change nothing here: accepted and reported."),
        True: ("Names that are refused", "Flags of Megatron-LM for features that this program does not have."),
    }
)
"""By `Recognised.refused`: the heading of the list, and the sentence below it."""
_STATUS: Mapping[str, str] = MappingProxyType(
    {
        "same": "as in Megatron-LM",
        "close": "close to Megatron-LM",
        "ours": "not in Megatron-LM",
        "not yet": "not available yet, but for its default",
        "refused": "not available, but for its default",
    }
)


def answer(words: Sequence[str], registry: Registry) -> str | None:
    """The text that the words ask for; None if they ask for none.

    Raises:
        FlagErrors: they ask for help on something that does not exist.
    """
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word in ("--help", "-h"):
            return _help(following, registry)
        if word == "--find":
            if not following:
                raise FlagErrors([Problem(what="--find needs a word", remedy="--find aux, or --help all")])
            return _find(following, registry)
    return None


def derived(plan: RunPlan) -> list[str]:
    """What follows from the flags, for the head of run.yaml."""
    parallel, batch, model = plan.parallel, plan.batch, plan.model
    ranks, copies = parallel.world_size, parallel.dp
    num_moe = sum(layer.is_moe for layer in model.layers)
    microbatches = batch.global_size // (batch.micro * copies)
    layers = [f"derived: {len(model.layers) - num_moe} dense layers, {num_moe} with experts"]
    return [
        "Every flag of this run and where its value came from. Start the same run with --config THIS_FILE.",
        f"derived: {ranks} ranks = {copies} data-parallel x {ranks // copies} model-parallel",
        f"derived: a step is {batch.global_size} sequences = {microbatches} microbatches of {batch.micro} per rank",
        *([] if plan.unknown_layers else layers),
        f"derived: vocabulary of {plan.data.vocab_size} tokens, padded to {model.vocab_size}",
        f"derived: {plan.loop.train_iters} iterations",
    ]


def _help(topic: str, registry: Registry) -> str:
    if topic.startswith("--") and topic != "--help":
        return _flag_page(topic, registry)
    if topic == "all":
        return "\n\n".join(_group_page(group, registry) for group in group_classes())
    if topic in group_classes():
        return _group_page(topic, registry)
    if registry.find(f"--{topic}"):
        return _flag_page(f"--{topic}", registry)
    if topic and not topic.startswith("-"):
        raise FlagErrors([_unknown_topic(topic, registry)])
    return _front_page(registry)


def _unknown_topic(topic: str, registry: Registry) -> Problem:
    close = near(topic, [*group_classes(), *registry.spellings])
    known = f"groups: {', '.join(group_classes())}"
    remedy = f"did you mean {' or '.join(close)}? ({known})" if close else f"{known}; --find WORD searches the flags"
    return Problem(what=f"there is no group and no flag {topic!r}", remedy=remedy)


def _front_page(registry: Registry) -> str:
    lines = [_FRONT]
    for flag, text in _documented(registry):
        if flag.declaration.essential:
            lines.append(_one_line(flag, text))
    counts = [f"{group} {sum(flag.group == group for flag in registry.flags.values())}" for group in group_classes()]
    lines += ["", *textwrap.wrap("Groups and their numbers of flags: " + ", ".join(counts), _WIDTH), _POINTERS]
    return "\n".join(lines)


def _group_page(group: str, registry: Registry) -> str:
    heading = " ".join((group_classes()[group].__doc__ or "").split())
    lines = [f"{group}: {heading}"]
    for flag, text in _documented(registry, group):
        lines += ["", f"  {_signature(flag)}"]
        lines += textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        if flag.declaration.status != "same":
            lines.append(f"      ({_status(flag)})")
    return "\n".join(lines)


def _flag_page(option: str, registry: Registry) -> str:
    found = registry.find(option)
    if found is None:
        today = old_names().get(normal(option))
        if today:
            return f"{option} is an old name. Today: {today}"
        known = find_recognised(normal(option))
        if known:
            outcome = "It is refused." if known[0].refused else "It is accepted without effect."
            return f"{option} {known[0].reason}. {outcome}"
        raise FlagErrors([unknown_flag(option, registry)])
    flag = found[0]
    text = docstrings(group_classes()[flag.group]).get(flag.name, "")
    recipes = recipes_with(flag)
    rows = [
        ("type", describe(flag.type)),
        ("default", _default(flag)),
        ("group", flag.group),
        ("spellings", ", ".join(dict.fromkeys((*flag.on_options, *flag.off_options)))),
        ("status", _status(flag)),
        ("recipes", ", ".join(recipes) if recipes else "none sets it"),
    ]
    lines = [flag.option, *textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
    for name, value in rows:
        indent = " " * 13
        lines += textwrap.wrap(f"  {name:<10} {value}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _find(word: str, registry: Registry) -> str:
    wanted = normal(word.lower()).split()

    def holds(*places: str) -> bool:
        """Whether every wanted word occurs."""
        return all(any(each in normal(place.lower()) for place in places) for each in wanted)

    hits = [_one_line(flag, text) for flag, text in _documented(registry) if holds(*_searched(flag, text))]
    hits += [f"  {old:<{_NAME_COLUMN}} old name of {today}" for old, today in old_names().items() if holds(old)]
    hits += [f"  {name:<{_NAME_COLUMN}} {outcome}" for name, outcome in _outcomes() if holds(name)]
    return "\n".join(hits) if hits else f"No flag has {word!r} in its name, text, choices or default."


def _searched(flag: Flag, text: str) -> list[str]:
    """Names, help, choices, and the default where it says more than on, off or not set."""
    default = () if flag.is_switch or flag.required or flag.default is None else words_of(flag.type, flag.default)
    return [*flag.on_options, *flag.off_options, text, *choices(flag.type), *default]


def recipes_with(flag: Flag) -> list[str]:
    """Recipes, and parts of recipes, that set a flag."""
    spellings = {normal(option).lstrip("-") for option in (*flag.on_options, *flag.off_options)}
    names = []
    for name, path in recipe_files():
        keys = (line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines())
        if any(normal(key.strip()).lstrip("-") in spellings for key in keys):
            names.append(name)
    return names


def _documented(registry: Registry, only: str | None = None) -> list[tuple[Flag, str]]:
    """Flags with their help, by group."""
    found = []
    for group, group_class in group_classes().items():
        if only in (None, group):
            texts = docstrings(group_class)
            found += [(flag, texts.get(flag.name, "")) for flag in registry.flags.values() if flag.group == group]
    return found


def _one_line(flag: Flag, text: str) -> str:
    name = f"  {flag.option:<{_NAME_COLUMN}} "
    default = "" if flag.required or flag.default in (None, False, ()) else f" [{_default(flag)}]"
    return name + textwrap.shorten(text, _WIDTH - len(name) - len(default), placeholder=" ...") + default


def _signature(flag: Flag) -> str:
    if flag.is_switch:
        return f"{flag.option} | {flag.off_options[-1]} [{_default(flag)}]"
    return f"{flag.option} {describe(flag.type)} [{_default(flag)}]"


def _default(flag: Flag) -> str:
    if flag.required:
        return "required"
    if flag.is_switch:
        return "on" if flag.default else "off"
    return "not set" if flag.default in (None, ()) else " ".join(words_of(flag.type, flag.default))


def _status(flag: Flag) -> str:
    meaning = _STATUS[flag.declaration.status]
    return f"{meaning}: {flag.declaration.note}" if flag.declaration.note else meaning


def surface(registry: Registry) -> str:
    """Every flag with its type, default and status, one a line: what a change of the flags looks like in a diff."""
    rows = [
        (flag.option, describe(flag.type), _default(flag), flag.declaration.status, " ".join(_other_options(flag)))
        for flag in sorted(registry.flags.values(), key=lambda flag: flag.option)
    ]
    lines = [" | ".join(row).rstrip(" |") for row in rows]
    lines += [f"{old} -> {today}" for old, today in old_names().items()]
    lines += [f"{name} -> {outcome}" for name, outcome in _outcomes()]
    return "\n".join(lines) + "\n"


def document(registry: Registry) -> str:
    """docs/flags.md."""
    lines = [_DOCUMENT_HEAD]
    for group, group_class in group_classes().items():
        heading = " ".join((group_class.__doc__ or "").split())
        lines += [
            f"## {group}",
            "",
            heading,
            "",
            "| flag | type | default | status | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [_table_row(flag, text) for flag, text in _documented(registry, group)]
        lines.append("")
    lines += ["## Old names", "", "| name | today |", "|---|---|"]
    lines += [f"| `{old}` | {_cell(today)} |" for old, today in old_names().items()]
    return "\n".join([*lines, *_recognised_rows()]) + "\n"


def _outcomes() -> Iterator[tuple[str, str]]:
    """Every name that is only recognised, with what happens to it."""
    for name, known in recognised_flags().items():
        yield name, f"{'refused' if known.refused else 'no effect'}: {known.reason}"


def _recognised_rows() -> Iterator[str]:
    """Names that are only recognised, by the reason they share."""
    for refused, (heading, text) in _RECOGNISED_HEADS.items():
        yield from ("", f"## {heading}", "", text, "", "| names | why |", "|---|---|")
        for known, same in groupby(recognised_flags().items(), key=lambda entry: entry[1]):
            if known.refused is refused:
                yield f"| {', '.join(f'`{name}`' for name, _ in same)} | {known.reason} |"


def _table_row(flag: Flag, text: str) -> str:
    names = ", ".join(f"`{option}`" for option in (flag.option, *_other_options(flag)))
    cells = (names, describe(flag.type), _default(flag), _status(flag), text)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _other_options(flag: Flag) -> list[str]:
    """Spellings besides `--x` and `--no-x`."""
    return [*flag.on_options[1:], *flag.off_options[1:]]
