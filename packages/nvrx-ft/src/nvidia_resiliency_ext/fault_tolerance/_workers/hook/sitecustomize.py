# SPDX-License-Identifier: Apache-2.0
"""What a prewarmed worker runs before it becomes a worker.

The interpreter imports this file as `sitecustomize` because the launcher put its folder in front of
`PYTHONPATH`. It imports the heavy modules and waits; on "go" it applies the worker's environment
and returns, and the interpreter runs the script. It imports nothing of ours, so that a worker is
not changed by us. Every failure before "go" ends the process: else the script would run.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_KNOWN_MODULES = frozenset(sys.modules)
_FD_VARIABLE = "NVRX_STANDBY_FD"
_PYTHONPATH_VARIABLE = "NVRX_STANDBY_PYTHONPATH"
_MARK = "(standby)"
_LARGEST_MESSAGE_BYTES = 1 << 20
_LEFT = 0
_LONGEST_HEAD_START_S = 1.0
_FAILED = 70
# Signals that glibc keeps for itself; it installs handlers with the first native thread.
_GLIBC_SIGNALS = 1 << 31 | 1 << 32
# Set from TMPDIR by torch._dynamo, whose value may be another at "go"; torch asks again if unset.
_COMPUTED_AGAIN = ("TORCHINDUCTOR_CACHE_DIR",)
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")


_Function = type(lambda: None)


class _ControlSocket:
    """The socket to the launcher: whole JSON messages, "go" with descriptors."""

    def __init__(self, fd: int) -> None:
        # `socket` would load ten modules more.
        import _socket

        self._api = _socket
        self._socket = _socket.socket(fileno=fd)
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for a message; return it and its descriptors. The launcher gone: leave."""
        import json

        fd_bytes = self._api.CMSG_SPACE(3 * 4)
        data, control, _, _ = self._socket.recvmsg(
            _LARGEST_MESSAGE_BYTES, fd_bytes, self._api.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(_LEFT)
        return json.loads(data), [
            fd for _, _, payload in control for fd in memoryview(payload).cast("i")
        ]

    def has_message(self) -> bool:
        """Return whether a message waits. The launcher gone: leave."""
        try:
            data = self._socket.recv(1, self._api.MSG_PEEK | self._api.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not data:
            os._exit(_LEFT)
        return True

    def send(self, **message: object) -> None:
        """Send the launcher a message; end this process if the launcher is gone."""
        import json

        try:
            self._socket.send(json.dumps(message).encode(), self._api.MSG_NOSIGNAL)
        except OSError:
            os._exit(_LEFT)

    def close(self) -> None:
        self._socket.close()


class _Group:
    """The changes that one entry of the import list made, or its part in other packages."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.modules: dict[str, ModuleType] = {}
        self.attributes: list[tuple[ModuleType, str]] = []
        self.functions: list[tuple[ModuleType, str, object, object]] = []
        self.lists: list[tuple[list[Any], list[Any], list[Any]]] = []
        self.environ: dict[str, str] = {}
        self.loggers: set[Any] = set()


class _Held:
    """Gives the imported modules back to the script when it first imports one of them.

    Until then the script sees `sys.modules`, packages, warnings filters and environment as a fresh
    interpreter has them. Each entry of the list is a group, given back with those before it: what
    DistributedDataParallel imports when it is first used appears only then. What an entry brought
    of other packages, such as numpy.random, can also be given back alone. A module is handed over
    as the loader's own creation: otherwise the import system executes it again.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._imports = order["imports"]
        self._watch = order["watch"]
        self._entry_dir = order["entry_dir"]
        self._groups: list[_Group] = []
        self._group_of: dict[str, int] = {}
        self._environ: dict[str, str | None] = dict(os.environ)
        self._path: tuple[str, ...] = ()

    def collect(self, control_socket: _ControlSocket) -> bool:
        """Import the order's list out of sight; return whether "go" cut that short."""
        import warnings

        tops = {name.partition(".")[0] for name, _ in self._imports}
        beside = self._entry_dir
        # A package beside the script is found only where the script's own folder is searched.
        is_borrowed = bool(beside) and any(
            os.path.exists(os.path.join(beside, top + end)) for top in tops for end in ("", ".py")
        )
        if is_borrowed:
            sys.path.insert(0, beside)
        watched: list[Any] = [warnings.filters, sys.meta_path]
        at_first = [list(live) for live in watched]
        is_short = False
        for name, optional in self._imports:
            is_short = control_socket.has_message()
            if is_short:
                break
            self._import(name, watched, optional=optional)
        for live, old in zip(watched, at_first, strict=True):
            if live != old:
                _replace_list(live, old)
        self._hide()
        if is_borrowed:
            sys.path.remove(beside)
            sys.path_importer_cache.pop(beside, None)
        return is_short

    def _import(self, name: str, watched: list[Any], *, optional: bool) -> None:
        before, environ, loggers = set(sys.modules), dict(os.environ), _enabled_loggers()
        lists, functions = [list(live) for live in watched], self._functions()
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            if not optional or not f"{name}.".startswith(f"{error.name}."):
                raise
        # `multiprocessing` makes `__mp_main__` another name of the script.
        library = sys.stdlib_module_names | {"__main__", "__mp_main__"}
        top = name.partition(".")[0]
        others, group = _Group(alone=True), _Group(alone=False)
        for key in set(sys.modules) - before:
            key_top = key.partition(".")[0]
            if key_top not in library and not key.startswith("_sysconfigdata"):
                is_own = key_top == top
                (group if is_own else others).modules[key] = sys.modules[key]
                self._group_of[key] = len(self._groups) + is_own
        # `torch._dynamo` wraps functions of torch. Other values may be flags that say that
        # something was registered, and taking those back would undo half of it.
        group.functions = [
            (module, attribute, old, vars(module)[attribute])
            for module, attribute, old in functions
            if vars(module).get(attribute) is not old
            and type(vars(module).get(attribute)) is _Function
        ]
        group.environ = {k: v for k, v in os.environ.items() if environ.get(k) != v}
        group.loggers = _enabled_loggers() - loggers
        group.lists = [
            (live, old, list(live)) for live, old in zip(watched, lists, strict=True) if live != old
        ]
        self._groups += [others, group]

    def _functions(self) -> list[tuple[ModuleType, str, object]]:
        return [
            (module, name, value)
            for group in self._groups
            for module in group.modules.values()
            for name, value in vars(module).items()
            if type(value) is _Function  # Asking an object for its class may run code of its own.
        ]

    def _hide(self) -> None:
        for group in reversed(self._groups):
            for module, name, old, _ in group.functions:
                setattr(module, name, old)
        for index, group in enumerate(self._groups):
            for key, module in group.modules.items():
                package, _, child = key.rpartition(".")
                parent = sys.modules.get(package)
                # Within its group a package comes and goes as a whole.
                if parent is None or self._group_of.get(package) == index:
                    continue
                if vars(parent).get(child) is module:
                    delattr(parent, child)
                    group.attributes.append((parent, child))
        for key in self._group_of:
            del sys.modules[key]
        for group in self._groups:
            for name in group.environ:
                _set_variable(name, self._environ.get(name))
        self._path = tuple(sys.path)
        # From here on: an import inside a held module must not load another copy of it.
        if self._group_of:
            sys.meta_path.insert(0, self)

    def origins(self) -> dict[str, str | None]:
        """Return {top-level name: file} of the held modules."""
        return {
            key: getattr(module, "__file__", None)
            for group in self._groups
            for key, module in group.modules.items()
            if "." not in key
        }

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the protocol's name
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Answer for held modules; leave once all are given back."""
        index = self._group_of.get(name)
        if index is None:
            if not any(group.modules for group in self._groups) and self in sys.meta_path:
                sys.meta_path.remove(self)
            return None
        module = self._groups[index].modules.get(name)
        if module is None and target is None:
            # Given back in this moment by another thread; with a target it is a reload.
            module = sys.modules.get(name)
        original = getattr(module, "__spec__", None)
        if module is None or original is None:
            return None
        spec: ModuleSpec = object.__new__(type(original))
        vars(spec).update(vars(original), loader=_Handover(self, module, original, index))
        return spec

    def give_back(self, index: int) -> None:
        """Put a group, and those before it, into `sys.modules`, and report late changes."""
        first = index if self._groups[index].alone else 0
        groups = [group for group in self._groups[first : index + 1] if group.modules]
        if not groups:
            return
        self._report_late_changes()
        for group in groups:
            modules, group.modules = group.modules, {}
            for key, module in modules.items():
                sys.modules.setdefault(key, module)
            for parent, child in group.attributes:
                setattr(parent, child, modules[f"{parent.__name__}.{child}"])
            for module, name, old, new in group.functions:
                if vars(module).get(name) is old:
                    setattr(module, name, new)
            for live, old, new in group.lists:
                _replace_list(live, _merged(list(live), old, new))
            for key, value in group.environ.items():
                if os.environ.get(key) == self._environ.get(key) and key not in _COMPUTED_AGAIN:
                    os.environ[key] = value
            # `logging.config` disables the loggers that exist; a fresh import makes them now.
            for logger in group.loggers:
                logger.disabled = False
            _renew_defaults(modules)

    def _report_late_changes(self) -> None:
        names = sorted(
            name
            for name in {*os.environ, *self._environ}
            if _is_import_time(name, self._watch)
            and os.environ.get(name) != self._environ.get(name)
        )
        for name in names:
            self._environ[name] = os.environ.get(name)
        # An entry behind all of the old ones cannot take the place of a module found there.
        last = max((at for at, old in enumerate(sys.path) if old in self._path), default=0)
        known = {*self._path, self._entry_dir}
        late = [entry for entry in sys.path[:last] if entry not in known]
        shadow = _shadowing(late, self.origins())
        if names:
            _warn(
                f"{', '.join(names)} changed after this worker's modules were imported ahead of "
                "time: modules that read it at import do not see it; use --ft-prewarm off"
            )
        if shadow:
            _warn(f"sys.path came too late: {shadow}; use --ft-prewarm off")


class _Handover:
    """The loader of one held module; other attributes are those of the real loader."""

    def __init__(self, held: _Held, module: ModuleType, spec: ModuleSpec, index: int) -> None:
        self._held = held
        self._module = module
        self._spec = spec
        self._index = index

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - the protocol's
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification, and give back the modules of its group."""
        module.__spec__ = self._spec
        self._held.give_back(self._index)

    def __getattr__(self, name: str) -> object:
        return getattr(self._spec.loader, name)


def _replace_list(live: list[Any], content: Sequence[Any]) -> None:
    if live is sys.meta_path:
        live[:] = content
        return
    import warnings

    # It tells the C part that the filters changed.
    warnings.resetwarnings()
    live[:] = content


def _merged(live: list[Any], old: Sequence[Any], new: list[Any]) -> list[Any]:
    """Add to `live` what `new` has more than `old`, at the end where it stands in `new`."""
    added = [item for item in new if item not in old and item not in live]
    first = next((at for at, item in enumerate(new) if item in old), len(new))
    front = [item for item in added if new.index(item) < first]
    return front + live + [item for item in added if item not in front]


def _enabled_loggers() -> set[Any]:
    logging = sys.modules.get("logging")
    loggers = logging.root.manager.loggerDict.values() if logging else ()
    return {logger for logger in loggers if getattr(logger, "disabled", None) is False}


def _renew_defaults(modules: Mapping[str, ModuleType]) -> None:
    """Evaluate arguments' defaults that name the default process group, as an import now would.

    Imported before the group exists they stay None, and nothing keeps the group alive: its end
    then comes with the model's, where torch 2.13 can deadlock with a gloo thread that needs the
    interpreter lock, unlike in a fresh worker.
    """
    module = modules.get("torch.distributed.nn.functional")
    world = getattr(getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None)
    if module is None or world is None:
        return
    for function in vars(module).values():
        defaults = getattr(function, "__defaults__", None)
        if not defaults or getattr(function, "__module__", None) != module.__name__:
            continue
        code = function.__code__
        names = code.co_varnames[: code.co_argcount][-len(defaults) :]
        function.__defaults__ = tuple(
            world if name == "group" and value is None else value
            for name, value in zip(names, defaults, strict=True)
        )


def _is_import_time(name: str, watch: Mapping[str, Sequence[str]]) -> bool:
    if name in watch["late"] or name.startswith(tuple(watch["late_prefixes"])):
        return False
    return name in watch["names"] or name.startswith(tuple(watch["prefixes"]))


def _warn(text: str) -> None:
    print(f"nvrx: WARNING: {text}", file=sys.stderr)  # noqa: T201 - logging is the script's


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _shadowing(directories: Iterable[str], origins: Mapping[str, str | None]) -> str | None:
    """Return a file in `directories` that shadows a module of `origins`, or None."""
    from importlib.machinery import all_suffixes

    seen: set[str] = set()
    for directory in directories:
        try:
            entries = os.listdir(directory or ".")
        except OSError:
            continue
        for entry in entries:
            name, dot, suffix = entry.partition(".")
            if name not in origins or name in seen:
                continue
            path = os.path.join(directory, entry)
            if not (
                (dot + suffix) in all_suffixes()
                if dot
                else os.path.isfile(os.path.join(path, "__init__.py"))
            ):
                continue
            seen.add(name)
            origin = origins[name]
            if origin is not None and not origin.startswith(os.path.join(directory, name)):
                return f"{path} stands before the module {name} from {origin}"
    return None


def _stand_aside() -> Callable[[], None]:
    """Let others go first, and say in `ps` and `top` what this is; return what undoes it.

    Niceness and SCHED_IDLE cannot be undone by an ordinary user. Affinity to one core is left
    alone too: libgomp, OpenBLAS and inductor count the cores while they are imported.
    """
    steps: list[Callable[[str], None]] = []

    def set_name(folder: str, name: str) -> None:
        with open(f"{folder}/comm", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(name)

    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, usual := os.sched_param(0))
            steps.append(lambda task: os.sched_setscheduler(int(task), os.SCHED_OTHER, usual))
    except OSError:
        pass
    try:
        with open("/proc/self/comm", encoding="utf-8", errors="surrogateescape") as file:
            old = file.read().rstrip("\n")
        set_name("/proc/self", f"{old[: 15 - len(_MARK)]}{_MARK}")
        steps.append(lambda task: set_name(f"/proc/self/task/{task}", old))
    except OSError:
        pass

    def undo() -> None:
        for task in os.listdir("/proc/self/task"):
            for step in steps:
                step(task)

    return undo


def _facts() -> dict[str, object]:
    """Return the process state that an import must not change, by a name for users."""
    import _locale
    import _signal  # type: ignore[import-not-found]
    import builtins

    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
    with open("/proc/self/limits", encoding="ascii", errors="replace") as file:
        limits = file.read()
    masks = [int(status[key], 16) & ~_GLIBC_SIGNALS for key in ("SigBlk", "SigIgn", "SigCgt")]
    threading = sys.modules.get("threading")
    contexts = sys.modules.get("multiprocessing.context")
    return {
        "the working directory": os.readlink("/proc/self/cwd"),
        "the umask": status.get("Umask"),
        "signal handlers": (masks, [_signal.getsignal(n) for n in range(1, _signal.NSIG)]),
        "a resource limit": limits,
        "an exception hook": (
            sys.excepthook,
            sys.unraisablehook,
            threading is None or threading.excepthook is threading.__excepthook__,
        ),
        "tracing or profiling": (sys.gettrace(), sys.getprofile()),
        "the display or breakpoint hook": (sys.displayhook, sys.breakpointhook),
        "a standard stream": (sys.stdin, sys.stdout, sys.stderr),
        "sys.path": list(sys.path),
        "the import system": (list(sys.path_hooks), builtins.__import__),
        "the locale": _locale.setlocale(_locale.LC_ALL),
        "the recursion limit": sys.getrecursionlimit(),
        "the priority or the cores": (os.getpriority(0, 0), os.sched_getaffinity(0)),
        "the multiprocessing start method": contexts and contexts._default_context._actual_context,  # noqa: SLF001 - asking would set it
    }


def _problem(before: Mapping[str, object], order: Mapping[str, Any], held: _Held) -> str | None:
    """Return why this process must not become a worker, or None."""
    after = _facts()
    changed = [name for name, value in after.items() if before[name] != value]
    if changed:
        return f"an import changed {' and '.join(changed)}"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(_DEVICES):
            return f"an import opened {target}"
    if len(sys._current_frames()) > 1:  # noqa: SLF001 - the only list without `threading`
        return "an import started a thread"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        pass
    else:
        return "an import started a process"
    loaded = {name.partition(".")[0] for name in sys.modules if name not in _KNOWN_MODULES}
    modules = {name: sys.modules[name] for name in loaded & set(sys.modules)}
    origins = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    origins.update(held.origins())
    named = {name.partition(".")[0] for name, _ in order["imports"]}
    beside = order["entry_dir"]
    for name, origin in origins.items():
        # Directly beside, not anywhere below: the environment may lie in the script's folder.
        own = (os.path.join(beside or "", name, ""), os.path.join(beside or "", f"{name}."))
        if beside and name not in named and (origin or "").startswith(own):
            return f"{origin} stands before the module {name}"
    return _shadowing([beside] * bool(beside) + order["path_dirs"], origins)


def _apply(go: Mapping[str, Any], fds: Sequence[int]) -> None:
    import time

    for target, fd in zip(go["streams"], fds, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for name in go["unset"]:
        os.environ.pop(name, None)
    os.environ.update(go["set"])
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["tempdir"] = None
    # `importlib.invalidate_caches` may load `importlib.metadata`, which takes longer than "go".
    for finder in list(sys.path_importer_cache.values()):
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def _stand_by(control_socket: _ControlSocket) -> None:
    import gc
    import time

    started = time.monotonic()
    order, _ = control_socket.receive()
    if os.getppid() != order["parent"]:
        raise RuntimeError("the command runs Python as a child of another process")
    undo = _stand_aside()
    before = _facts()
    held = _Held(order)
    # Imports make many objects and little garbage; collecting takes a quarter of their time.
    gc.disable()
    is_short = held.collect(control_socket)
    # What imports printed is the launcher's to show, not the worker's.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if not is_short:
        # `gc.freeze` would save some tenths of a second at the worker's exit, and make it four
        # times as likely that a gloo thread is still at work then: torch 2.13 aborts on that.
        gc.collect()
    gc.enable()
    problem = _problem(before, order, held)
    seconds = time.monotonic() - started
    if problem is not None and control_socket.has_message():
        raise RuntimeError(problem)
    if not control_socket.has_message():
        control_socket.send(
            kind="ready",
            seconds=seconds,
            problem=problem,
            files=[file for file in held.origins().values() if file],
        )
    go, fds = control_socket.receive()
    undo()
    _apply(go, fds)
    control_socket.send(kind="begun", seconds=seconds)
    control_socket.close()
    if go["not_before"] is not None:
        time.sleep(min(max(0.0, go["not_before"] - time.monotonic()), _LONGEST_HEAD_START_S))


def _enter(fd: int) -> None:
    control_socket = None
    try:
        control_socket = _ControlSocket(fd)
        _stand_by(control_socket)
    except BaseException as error:  # noqa: BLE001 - else the script would run, as if all were well
        if control_socket is not None:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            control_socket.send(kind="failed", reason=reason[:1000])
        os._exit(_FAILED)


def _leave_path() -> str | None:
    """Make `sys.path` and the environment what they would be without this file."""
    here = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    fd = os.environ.pop(_FD_VARIABLE, None)
    if fd is not None:
        _set_variable("PYTHONPATH", os.environ.pop(_PYTHONPATH_VARIABLE, None))
    return fd


_fd = _leave_path()
if _fd is not None:
    _enter(int(_fd))
# The host's own file, if there is one. If not, the error names `sitecustomize`, and `site` takes
# that for "there is none". The name must be free for the search and set when it succeeds.
sys.modules.pop(__name__, None)
__import__(__name__)
