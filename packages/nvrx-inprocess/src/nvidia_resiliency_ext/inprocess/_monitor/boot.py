# SPDX-License-Identifier: Apache-2.0
"""Start the monitor or the store server by this file's path, without importing torch.

Importing the package would import torch first, for seconds. So the package stands in `sys.modules`
as an empty shell, under which its light modules can be imported; its attribute `COMPLETE` fills it.

    python boot.py DESCRIPTOR                    the monitor, or one function (`main`)
    python boot.py --store DUTY                  the store server (`_store_server.py`)
    python -I -S boot.py --detach PROGRAM ...    a program that is nobody's child
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

_PACKAGE = "nvidia_resiliency_ext.inprocess"
COMPLETE = "_nvrx_complete"


def make_shell() -> None:
    """Put an empty shell of the package in place."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.loader is None:
        raise ImportError(f"{_PACKAGE} is not to be found")
    package = importlib.util.module_from_spec(spec)
    setattr(package, COMPLETE, complete_package)
    sys.modules[_PACKAGE] = package
    parent_name, _, name = _PACKAGE.rpartition(".")
    setattr(sys.modules[parent_name], name, package)


def complete_package() -> None:
    """Execute the package's `__init__` if it was left out at the start; one thread."""
    package = sys.modules.get(_PACKAGE)
    if package is None or not hasattr(package, COMPLETE):
        return
    delattr(package, COMPLETE)
    spec = package.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(package)


def detach(program: list[str]) -> None:
    """Run a program whose parent has ended; this interpreter has none of our packages to fork."""
    os.umask(0o077)
    os.chdir("/")
    if os.fork() == 0:
        os.execv(program[0], program)  # noqa: S606 - that is the point


def main() -> int:
    """Carry out the arguments, or the order in the pipe of that descriptor; return the exit code.

    An order with `listener`, `directory`, `starter` and `needs_torch` runs the monitor; one with
    `call`, `args` and `kwargs` calls a function.
    """
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own_folder]
    if sys.argv[1] == "--store":
        make_shell()
        from nvidia_resiliency_ext.inprocess import _store_server

        return _store_server.main(*sys.argv[2:])
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        order = json.load(file)
    sys.path += [entry for entry in order["sys_path"] if entry not in sys.path]
    make_shell()
    if "call" in order:
        from nvidia_resiliency_ext.inprocess._monitor import messages

        function = messages.load_named(*order["call"])
        args = messages.load_kwargs(order["args"])["args"]
        function(*args, **messages.load_kwargs(order["kwargs"]))
        return 0
    from nvidia_resiliency_ext.inprocess._monitor import program

    own = (order["starter"], order["needs_torch"])
    return program.run(order["listener"], order["directory"], *own)


if __name__ == "__main__":
    if sys.argv[1] == "--detach":
        detach(sys.argv[2:])
    elif sys.argv[1] == "--store":
        sys.exit(main())
    else:
        # Threads may sit in the store, where the interpreter's end would not wait for them.
        os._exit(main())
