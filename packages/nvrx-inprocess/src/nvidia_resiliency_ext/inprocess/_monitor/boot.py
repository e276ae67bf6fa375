# SPDX-License-Identifier: Apache-2.0
"""First file of the monitor's program: finds our packages, but leaves torch for later.

It is run by its path. Importing the package of this file would import torch before anybody is
listened to, so the package stands in `sys.modules` as an empty shell at first, under which its
light modules can be imported; what its attribute `COMPLETE` holds fills it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading

_PACKAGE = "nvidia_resiliency_ext.inprocess"
COMPLETE = "_nvrx_complete"
_lock = threading.Lock()


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
    """Run what the package does when it is imported, if that has not happened; any thread."""
    with _lock:
        package = sys.modules.get(_PACKAGE)
        if package is None or not hasattr(package, COMPLETE):
            return
        delattr(package, COMPLETE)
        spec = package.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(package)


def main() -> int:
    """Do what the order says that lies in the pipe of which the argument is the descriptor.

    That is to be the monitor, with `listener`, `directory`, `starter` and `needs_torch`; or to call
    a function, with its name in `call` and its arguments.
    """
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        order = json.load(file)
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own_folder]
    sys.path += [entry for entry in order["sys_path"] if entry not in sys.path]
    make_shell()
    if "call" in order:
        from nvidia_resiliency_ext.inprocess._monitor import factory

        function = factory.load_named(*order["call"])
        function(*factory.load_args(order["args"]), **factory.load_kwargs(order["kwargs"]))
        return 0
    from nvidia_resiliency_ext.inprocess._monitor import program

    own = (order["starter"], order["needs_torch"])
    return program.run(order["listener"], order["directory"], *own)


if __name__ == "__main__":
    # Threads may sit in the store, where the interpreter's end would not wait for them.
    os._exit(main())
