# SPDX-License-Identifier: Apache-2.0
"""Read the command line of `ft_launcher`; its flags are listed in `_config/flags.py`."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from nvidia_resiliency_ext.shared_utils.completion import PrintCompletion
from nvidia_resiliency_ext.shared_utils.console import write_err, write_out

from ._config import values
from ._config.flags import FLAGS, GROUPS, OLD_SPELLINGS, OTHER_SPELLINGS, TORCHRUN, Flag

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["get_args_parser", "parse_args"]

PROGRAM = "ft_launcher"
EXIT_USAGE = 2
_WIDEST_HELP = 100
_NARROWEST_HELP = 60

# Few scripts have flags of these names; others, such as --role, may well be theirs.
_ONLY_OURS = {"nnodes", "nproc-per-node", "node-rank", "standalone"} | {
    flag.name for flag in FLAGS if flag.name.startswith(("ft-", "rdzv-", "max-restarts"))
}
_SHORT = {flag.short: flag for flag in FLAGS if flag.short}
_BY_NAME = {flag.name: flag for flag in FLAGS}


def usage_error(problem: object, program: str = PROGRAM) -> NoReturn:
    """Print one line to stderr about a wrong command line or file, and exit with 2."""
    text = " ".join(str(problem).split())
    write_err(f"{program}: error: {text}\n")
    sys.exit(EXIT_USAGE)


def get_args_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    Its result has a value for each flag, and also `given` (by attribute, the flag or environment
    variable of each value that is not a default) and `warnings` (texts to be logged once).

    Example:
        >>> get_args_parser().parse_args(["--nnodes=2", "train.py", "--lr=1"]).training_script_args
        ['--lr=1']
    """
    parser = FlagParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] SCRIPT [arguments of the script]",
        description="Run a PyTorch program on the workers of this node and keep it running. Flags"
        " may be written with underscores.",
    )
    groups = parser.add_flags(FLAGS)
    groups[GROUPS[-1]].description = (
        "Still taken, with a warning: --ft-param-OPTION for --ft-OPTION, and "
        + ", ".join(f"--{old}" for old in OLD_SPELLINGS if not old.startswith("ft-param-"))
        + "."
    )
    parser.add_argument("training_script", nargs="?", help="Script or, with -m, module to run.")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="Its arguments, taken as they are."
    )
    return parser


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Return `ft_launcher`'s command line, parsed from `args` (None: the process's arguments)."""
    return get_args_parser().parse_args(args)


def _help_text(flag: Flag) -> str:
    text = flag.help
    default = flag.shown_default if flag.default is None else flag.default
    # By identity: a default of 0 is one worth showing, and equals False.
    has_default = default is not None and default is not False and default not in ("", "false", [])
    if has_default:
        text += f" Default: {getattr(default, 'name', default)}."
    return text.replace("%", "%%")


class _DashesOnly(argparse.HelpFormatter):
    """Shows each flag with dashes alone; the underscores that are taken for them are noise."""

    def add_argument(self, action: argparse.Action) -> None:
        shown = copy.copy(action)
        shown.option_strings = [word for word in action.option_strings if "_" not in word]
        super().add_argument(shown)


def _formatter(prog: str) -> argparse.HelpFormatter:
    # argparse would import shutil, with its compression modules, to ask the terminal.
    try:
        columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
    except (OSError, ValueError):
        columns = _WIDEST_HELP
    width = min(max(columns - 2, _NARROWEST_HELP), _WIDEST_HELP)
    return _DashesOnly(prog, max_help_position=30, width=width)


class _Version(argparse.Action):
    """Print the self-check's findings about packages, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002  # argparse names it so
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from nvidia_resiliency_ext.shared_utils import doctor

        found = doctor.package_versions()
        width = max((len(finding.topic) for finding in found), default=0)
        lines = [
            f"{finding.topic:<{width}}  "
            f"{'' if finding.level in ('ok', 'info') else finding.level + ': '}{finding.text}\n"
            for finding in found
        ]
        write_out("".join(lines))
        parser.exit()


_ACTIONS: dict[str, type[argparse.Action]] = {
    "version": _Version,
    "print-completion": PrintCompletion,
}


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` that decides itself where the arguments of the script begin."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog, usage, description, formatter_class=_formatter, allow_abbrev=False, add_help=False
        )

    def add_flags(self, flags: Sequence[Flag]) -> dict[str, argparse._ArgumentGroup]:
        """Add flags, grouped by title, and `--help`; return the groups."""
        titles = [title for title in GROUPS if any(flag.group == title for flag in flags)]
        groups = {title: self.add_argument_group(title) for title in titles}
        self._read_here = {flag.name for flag in flags} - _ACTIONS.keys()
        groups[titles[0]].add_argument("-h", "--help", action="help", help="Show this and leave.")
        for flag in flags:
            words = [f"-{flag.short}"] if flag.short else []
            # `_split` takes any mixture; these two are for help and completion.
            words += dict.fromkeys((f"--{flag.name}", f"--{flag.name.replace('-', '_')}"))
            options: dict[str, Any] = {"dest": flag.attribute, "help": _help_text(flag)}
            if flag.name in _ACTIONS:
                options["action"] = _ACTIONS[flag.name]
            elif flag.kind is None:
                options |= {"action": "store_true", "default": argparse.SUPPRESS}
            else:
                options |= {"metavar": flag.kind.metavar, "default": argparse.SUPPRESS}
            groups[flag.group].add_argument(*words, **options)
        return groups

    def parse_args(  # type: ignore[override]  # the overloads add nothing here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(_unknown(word) for word in unknown))
        if parsed.training_script is None and not getattr(parsed, "print_config", False):
            self.error(f"no script to run; write {PROGRAM} [options] SCRIPT [arguments]")
        return parsed

    def parse_known_args(  # type: ignore[override]  # the overloads add nothing here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        namespace = argparse.Namespace() if namespace is None else namespace
        given: dict[str, tuple[Any, str]] = {}
        words, rest, warnings = self._split(list(sys.argv[1:] if args is None else args), given)
        parsed, unknown = super().parse_known_args(words, namespace)
        problems = _fill(parsed, given, os.environ)
        if problems:
            self.error("; ".join(problems))
        parsed.training_script = rest[0] if rest else None
        parsed.training_script_args = rest[1:]
        warnings += _misplaced(parsed.training_script_args)
        parsed.warnings = warnings + [
            f"{parsed.given[flag.attribute]} is deprecated; {flag.deprecated}"
            for flag in FLAGS
            if flag.deprecated and flag.attribute in parsed.given
        ]
        return parsed, unknown

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if file is None:
            write_out(self.format_help())
        else:
            file.write(self.format_help())

    def error(self, message: str) -> NoReturn:
        usage_error(message, self.prog)

    def _split(
        self, args: list[str], given: dict[str, tuple[Any, str]]
    ) -> tuple[list[str], list[str], list[str]]:
        """Put flags into `given`; return other words, those of the script, and warnings."""
        others: list[str] = []
        warnings: list[str] = []
        position = 0
        while position < len(args):
            word = args[position]
            if word != "--" and (not word.startswith("-") or word == "-"):
                break
            position += 1
            if word == "--":
                break
            flag, name, value = _recognise(word)
            if name in OLD_SPELLINGS:
                text = f"--{name} is deprecated; use --{OLD_SPELLINGS[name]}"
                warnings += [text] if text not in warnings else []
            if flag is None:
                others.append(word)
                continue
            if flag.kind is None:
                if value is not None:
                    self.error(f"--{flag.name} takes no value, got {value!r}")
                # Further letters of the same word, as in -mr3.
                if not word.startswith("--") and len(word) > 2:  # noqa: PLR2004  # dash and letter
                    position -= 1
                    args[position] = "-" + word[2:]
            elif value is None:
                value = args[position] if position < len(args) else "--"
                # A negative number or a single dash is a value.
                if value.startswith("--") or (value.startswith("-") and value[1:2] in _SHORT):
                    self.error(f"--{flag.name} needs a value: {flag.kind.expects}")
                position += 1
            if flag.name in self._read_here:
                given[flag.attribute] = (True if value is None else value, f"--{flag.name}")
            else:
                others.append(f"--{flag.name}" if value is None else f"--{flag.name}={value}")
        return others, args[position:], warnings


def _recognise(word: str) -> tuple[Flag | None, str, str | None]:
    """Return the flag of a word, the name it was called by, and the value in the same word."""
    if not word.startswith("--"):
        flag = _SHORT.get(word[1])
        if flag is None or flag.kind is None or len(word) == 2:  # noqa: PLR2004  # dash and letter
            return flag, word[1], None
        return flag, word[1], word[2:].removeprefix("=")
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    present = OLD_SPELLINGS.get(name) or OTHER_SPELLINGS.get(name, name)
    flag = _BY_NAME.get(present) or _abbreviated(name)
    return flag, name, value if equals else None


def _abbreviated(name: str) -> Flag | None:
    """Return the only flag that begins so: of torchrun's, where there is one, else of all."""
    for flags in ([flag for flag in FLAGS if flag.group == TORCHRUN], FLAGS):
        found = [flag for flag in flags if name and flag.name.startswith(name)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _misplaced(script_args: Sequence[str]) -> list[str]:
    """Return a sentence where words behind the script look like flags of the launcher."""
    names = [word.partition("=")[0] for word in script_args if word.startswith("--")]
    ours = [name for name in names if name[2:].replace("_", "-") in _ONLY_OURS]
    if not ours:
        return []
    which = ", ".join(dict.fromkeys(ours))
    text = f"{which}: behind the script a flag is the script's, and the launcher does not see it"
    return [f"{text}; the launcher's flags stand before the script"]


def _unknown(word: str) -> str:
    from ._core.errors import nearest

    name = word.partition("=")[0]
    begun = name.replace("_", "-")
    longer = sorted(f"--{flag.name}" for flag in FLAGS if f"--{flag.name}".startswith(begun))
    if len(longer) > 1 and begun.startswith("--"):
        return f"flag {values.describe(name)} is short for several: {', '.join(longer)}"
    spellings = [f"--{flag.name}" for flag in FLAGS] + [f"--{old}" for old in OLD_SPELLINGS]
    hint = nearest(begun, spellings) or f"; see {PROGRAM} --help"
    return f"unknown flag {values.describe(name)}{hint}"


def _fill(
    parsed: argparse.Namespace, given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str]
) -> list[str]:
    """Set `given` and all flags' attributes, by flag or `PET_` variable; return the problems."""
    problems: list[str] = []
    parsed.given = {}
    for flag in FLAGS:
        variable = f"PET_{flag.attribute.upper()}"
        value, where = given.get(flag.attribute, (flag.default, ""))
        if not where and flag.env and environ.get(variable):
            value, where = environ[variable], variable
        if where:
            parsed.given[flag.attribute] = where
            with values.noting(problems):
                read = values.read(flag.kind or values.BOOL, value, where)
                # "none" given on the command line must still win over a file.
                value = value if read is None else read
        setattr(parsed, flag.attribute, list(value) if isinstance(value, list) else value)
    return problems
