# SPDX-License-Identifier: Apache-2.0
"""Completion of command lines by bash and zsh, written from a program's parser.

`PrintCompletion` is the action of a flag `--print-completion SHELL`. A user loads what it prints:

    eval "$(ft_launcher --print-completion bash)"
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any, Final, NoReturn

from .console import write_out

__all__ = ["SHELLS", "PrintCompletion", "completion_script"]

SHELLS: Final = ("bash", "zsh")

# zsh runs completions that are written for bash, once it is told so.
_FOR_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script by which `shell` completes the flags and word values of a `parser`.

    Everything else, such as a script or a file, is completed as file names.

    Raises:
        ValueError: The shell is none of `SHELLS`.
    """
    if shell not in SHELLS:
        raise ValueError(f"{shell!r} is none of {', '.join(SHELLS)}")
    actions = parser._actions  # noqa: SLF001 - argparse has no other way to list them
    flags = [word for action in actions for word in _shown(action) if word.startswith("--")]
    takes = "|".join(word for a in actions if a.nargs != 0 for word in _shown(a)) or "--"
    values = "".join(
        f"    {'|'.join(_shown(action))})"
        f' COMPREPLY=($(compgen -P "$head" -W "{" ".join(words)}" -- "$cur")); return ;;\n'
        for action in actions
        if _shown(action) and (words := _words_of(action))
    )
    has_another = any(action.nargs == argparse.REMAINDER for action in actions)
    return (_FOR_ZSH if shell == "zsh" else "") + _filled(
        "completion.sh",
        function="_" + re.sub(r"\W", "_", parser.prog),
        program=parser.prog,
        border=_filled("completion_border.sh", takes=takes) if has_another else "",
        values=values,
        takes=takes,
        flags=" ".join(sorted(flags)),
    )


def _filled(name: str, **words: str) -> str:
    """Return the script of that name beside this module, with `words` in their `@places@`."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        text = file.read().partition("\n")[2]  # all but the licence
    for place, word in words.items():
        text = text.replace(f"@{place}@", word)
    return text


def _shown(action: argparse.Action) -> list[str]:
    return [word for word in action.option_strings if "_" not in word]


def _words_of(action: argparse.Action) -> list[str]:
    """Return the values that a flag takes, where these are a few words."""
    metavar = action.metavar
    if isinstance(metavar, str) and re.fullmatch(r"\{[\w.-]+(,[\w.-]+)*\}", metavar):
        return metavar.strip("{}").split(",")
    if metavar == "BOOL":
        return ["true", "false"]
    return [str(word) for word in action.choices or ()]


class PrintCompletion(argparse.Action):
    """Print the script by which a shell completes the parser's command line, and exit.

    Arguments (`option_strings`, `dest`, `more`, `parser`, `values`) are as of `argparse.Action`.

    Example:
        >>> parser = argparse.ArgumentParser(prog="train")
        >>> flag = parser.add_argument("--print-completion", action=PrintCompletion)
    """

    def __init__(self, option_strings: list[str], dest: str, **more: Any) -> None:
        more |= {"choices": SHELLS, "metavar": "{" + ",".join(SHELLS) + "}"}
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **more)

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, values: Any, *_: object
    ) -> NoReturn:
        """Print the script; end the program."""
        write_out(completion_script(parser, values))
        parser.exit()
