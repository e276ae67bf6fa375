# SPDX-License-Identifier: Apache-2.0
"""What a standby worker runs before it becomes a worker; it knows nothing of ranks and cycles.

The interpreter imports this file under the name `sitecustomize` because the launcher put its
folder in front of `PYTHONPATH`. It takes itself out of the way, imports the heavy modules, tells
the launcher "ready" and waits. On "go" it applies the worker's environment and returns; the
interpreter then runs the script as ever. It imports nothing of ours, so that a worker is not
changed by us, and every failure before "go" ends the process: without that the interpreter would
go on to run the training script.
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
_FAILED = 70
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _SIGKILL = 1, 2, 9
# Signals that glibc keeps for itself; it installs handlers with the first native thread.
_GLIBC_SIGNALS = 1 << 31 | 1 << 32
# Set from TMPDIR by torch._dynamo, whose value may be another at "go"; torch asks again if unset.
_COMPUTED_AGAIN = ("TORCHINDUCTOR_CACHE_DIR",)
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")


class _Door:
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

        flags = getattr(self._api, "MSG_CMSG_CLOEXEC", 0)
        room = self._api.CMSG_SPACE(3 * 4)
        data, control, _, _ = self._socket.recvmsg(_LARGEST_MESSAGE_BYTES, room, flags)
        if not data:
            os._exit(_LEFT)
        fds: list[int] = []
        for level, kind, payload in control:
            if level == self._api.SOL_SOCKET and kind == self._api.SCM_RIGHTS:
                whole = len(payload) - len(payload) % 4
                fds += memoryview(payload)[:whole].cast("i")
        return json.loads(data), fds

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
        """Tell the launcher something; it may be gone."""
        import json

        try:
            self._socket.send(json.dumps(message).encode(), self._api.MSG_NOSIGNAL)
        except OSError:
            os._exit(_LEFT)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class _Held:
    """Gives the imported modules back to the script at its first import of one of them.

    Until then the script sees `sys.modules`, the warnings filters and the environment as a fresh
    interpreter has them. A module is handed over as the loader's own creation: returning it from
    `find_spec` in any other way makes the import system execute it a second time.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._watch = order["watch"]
        self._entry_dir = order["entry_dir"]
        self._groups: list[dict[str, ModuleType]] = []
        self._group_of: dict[str, int] = {}
        self._environ: dict[str, str | None] = dict(os.environ)
        self._environ_added: dict[str, str] = {}
        self._path: tuple[str, ...] = ()
        self._lists: tuple[tuple[list[Any], list[Any], list[Any]], ...] = ()

    def collect(
        self, imports: Iterable[tuple[str, bool]], load: Callable[[str, bool], bool]
    ) -> None:
        """Run `load(name)` for each import and take what it brought out of `sys.modules`."""
        import warnings

        library = sys.stdlib_module_names
        watched: list[Any] = [warnings.filters, sys.meta_path]
        lists = [(live, list(live)) for live in watched]
        tops: dict[str, int] = {}
        for name, optional in imports:
            before = set(sys.modules)
            if not load(name, optional):
                break
            new = [n for n in sys.modules if n not in before and n.partition(".")[0] not in library]
            index = tops.setdefault(name.partition(".")[0], len(self._groups))
            if index == len(self._groups):
                self._groups.append({})
            for key in new:
                self._groups[index][key] = sys.modules[key]
                self._group_of[key] = index
        for key in self._group_of:
            del sys.modules[key]
        self._lists = tuple((live, old, list(live)) for live, old in lists if live != old)
        for live, old, _ in self._lists:
            _replace_list(live, old)
        for key, value in os.environ.items():
            if self._environ.get(key) != value:
                self._environ_added[key] = value
        for key in self._environ_added:
            _set_variable(key, self._environ.get(key))
        self._path = tuple(sys.path)

    def origins(self) -> dict[str, str | None]:
        """Return {top-level name: file} of the held modules."""
        found: dict[str, str | None] = {}
        for group in self._groups:
            for key, module in group.items():
                if "." not in key:
                    found[key] = getattr(module, "__file__", None)
        return found

    def install(self) -> None:
        """Stand in front of the import system; called when everything else is done."""
        if self._group_of:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the protocol's name
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Answer for held modules; leave once all are given back."""
        index = self._group_of.get(name)
        if index is None:
            if not any(self._groups) and self in sys.meta_path:
                sys.meta_path.remove(self)
            return None
        module = self._groups[index].get(name)
        if module is None and target is None:
            # Given back in this moment by another thread; with a target it is a reload.
            module = sys.modules.get(name)
        known = getattr(module, "__spec__", None)
        if module is None or known is None:
            return None
        return self._spec(name, module, known, index)

    def _spec(self, name: str, module: ModuleType, known: ModuleSpec, index: int) -> ModuleSpec:
        parts = known.submodule_search_locations
        spec = type(known)(
            name,
            _Handover(self, module, known, index),  # type: ignore[arg-type]
            origin=known.origin,
            is_package=parts is not None,
        )
        if parts is not None:
            spec.submodule_search_locations = list(parts)
        spec.has_location = known.has_location
        spec.cached = known.cached
        return spec

    def give_back(self, index: int) -> None:
        """Put all modules up to a group into `sys.modules` and say what came too late."""
        groups = [group for group in self._groups[: index + 1] if group]
        if not groups:
            return
        self._report_late_changes()
        for group in groups:
            for key, module in group.items():
                sys.modules.setdefault(key, module)
            group.clear()
        for live, old, new in self._lists:
            _replace_list(live, _merged(list(live), old, new))
        self._lists = ()
        for key, value in self._environ_added.items():
            if os.environ.get(key) == self._environ.get(key) and key not in _COMPUTED_AGAIN:
                os.environ[key] = value
        self._environ_added = {}
        _enable_loggers()

    def _report_late_changes(self) -> None:
        names = sorted(
            name
            for name in {*os.environ, *self._environ}
            if _is_import_time(name, self._watch)
            and os.environ.get(name) != self._environ.get(name)
        )
        for name in names:
            self._environ[name] = os.environ.get(name)
        late = [entry for entry in sys.path if entry not in self._path]
        late = [entry for entry in late if entry != self._entry_dir and self._goes_first(entry)]
        shadow = _shadowing(late, self.origins())
        if names:
            _warn(
                f"{', '.join(names)} changed after this worker's modules were imported ahead of "
                "time: modules that read it at import do not see it; use --ft-prewarm off"
            )
        if shadow:
            _warn(f"sys.path came too late: {shadow}; use --ft-prewarm off")

    def _goes_first(self, entry: str) -> bool:
        # An entry behind all of the old ones cannot take the place of a module found there.
        known = [place for place, old in enumerate(sys.path) if old in self._path]
        return bool(known) and sys.path.index(entry) < known[-1]


class _Handover:
    """The loader of one held module; asks the real loader whatever else it is asked."""

    def __init__(self, held: _Held, module: ModuleType, spec: ModuleSpec, index: int) -> None:
        self._held = held
        self._module = module
        self._spec = spec
        self._index = index

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - the protocol's
        """Return the module that exists."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system wrote into it, and give all of them back."""
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
    first = next((place for place, item in enumerate(new) if item in old), len(new))
    front = [item for item in added if new.index(item) < first]
    return front + live + [item for item in added if item not in front]


def _enabled_loggers() -> set[Any]:
    logging = sys.modules.get("logging")
    loggers = logging.root.manager.loggerDict.values() if logging else ()
    return {logger for logger in loggers if getattr(logger, "disabled", None) is False}


def _enable_loggers() -> None:
    # `logging.config` disables the loggers that exist; a fresh import would make them afterwards.
    for logger in _loggers:
        logger.disabled = False
    _loggers.clear()


_loggers: set[Any] = set()


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
    """Return what in `directories` would be found before a module of `origins`, or None."""
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


def _die_with_parent(parent: int) -> Callable[[], object]:
    """Let the kernel kill us with the launcher; return what puts the old setting back."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
    old = ctypes.c_int(0)
    prctl(_PR_GET_PDEATHSIG, ctypes.addressof(old))
    if old.value == 0:
        prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise RuntimeError("the command runs Python as a child of another process")
    return lambda: prctl(_PR_SET_PDEATHSIG, old.value)


def _step_back() -> Callable[[], object]:
    """Take the processor only after others; return what undoes it.

    Niceness and SCHED_IDLE cannot be undone by an ordinary user. Affinity to one core is left
    alone too: libgomp, OpenBLAS and inductor count the cores while they are imported.
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return lambda: None
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return lambda: None

    def undo() -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))

    return undo


def _mark_name() -> Callable[[], object]:
    """Show in `ps` and `top` that this is a standby; return what undoes it."""
    try:
        with open("/proc/self/comm", encoding="utf-8", errors="surrogateescape") as file:
            old = file.read().rstrip("\n")
        with open("/proc/self/comm", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{old[: 15 - len(_MARK)]}{_MARK}")
    except OSError:
        return lambda: None

    def undo() -> None:
        for thread in os.listdir("/proc/self/task"):
            path = f"/proc/self/task/{thread}/comm"
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(old)

    return undo


def _facts() -> dict[str, object]:
    """Return what an import may not change, by the name that a person would give it."""
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


def _importer(door: _Door, go_seen: list[str]) -> Callable[[str, bool], bool]:
    """Return what imports one entry of the list; it declines once "go" is there."""

    def load(name: str, optional: bool) -> bool:
        if door.has_message():
            go_seen.append(name)
            return False
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            if not optional or not f"{name}.".startswith(f"{error.name}."):
                raise
        return True

    return load


def _warm(door: _Door, order: Mapping[str, Any], held: _Held) -> bool:
    """Import everything in the order's list; return whether "go" cut it short."""
    beside = order["entry_dir"]
    tops = {name.partition(".")[0] for name, _ in order["imports"]}
    # A package beside the script is found only where the script's own folder is searched.
    borrowed = bool(beside) and any(
        os.path.exists(os.path.join(beside, top + suffix)) for top in tops for suffix in ("", ".py")
    )
    go_seen: list[str] = []
    if borrowed:
        sys.path.insert(0, beside)
    held.collect(order["imports"], _importer(door, go_seen))
    if borrowed:
        sys.path.remove(beside)
        sys.path_importer_cache.pop(beside, None)
    return bool(go_seen)


def _apply(go: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Make this process what "go" says: streams, environment, folder, umask, cores."""
    import time

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for target, fd in zip(go["streams"], fds, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for name in go["unset"]:
        os.environ.pop(name, None)
    os.environ.update(go["set"])
    if go["cwd"] is not None:
        os.chdir(go["cwd"])
    if go["umask"] is not None:
        os.umask(go["umask"])
    if go["cores"] is not None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), go["cores"])
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].__dict__["tempdir"] = None
    # `importlib.invalidate_caches` may load `importlib.metadata`, which takes longer than "go".
    for finder in list(sys.path_importer_cache.values()):
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def _private_bytes() -> int | None:
    total = 0
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith(("Private_Clean:", "Private_Dirty:")):
                    total += int(line.split()[1]) << 10
    except OSError:
        return None
    return total


def _stamps(held: _Held) -> list[list[str | int]]:
    """Return [file, size, time of change] of the held top-level modules."""
    stamps: list[list[str | int]] = []
    for path in sorted(filter(None, held.origins().values())):
        try:
            status = os.stat(path)
        except OSError:
            continue
        stamps.append([path, status.st_size, status.st_mtime_ns])
    return stamps


def _stand_by(door: _Door) -> None:
    import gc
    import time

    started = time.monotonic()
    order, _ = door.receive()
    undo = [_die_with_parent(order["parent"]), _step_back(), _mark_name()]
    before, loggers = _facts(), _enabled_loggers()
    held = _Held(order)
    is_short = _warm(door, order, held)
    _loggers.update(_enabled_loggers() - loggers)
    if not is_short:
        gc.collect()
    gc.freeze()
    problem = _problem(before, order, held)
    seconds = time.monotonic() - started
    if problem is not None and door.has_message():
        raise RuntimeError(problem)
    if not door.has_message():
        door.send(
            kind="ready",
            pid=os.getpid(),
            modules=len(sys.modules) + len(held._group_of),  # noqa: SLF001 - same module
            seconds=seconds,
            private_bytes=_private_bytes(),
            problem=problem,
            files=_stamps(held),
        )
    go, fds = door.receive()
    for step in undo[1:]:
        step()
    _apply(go, fds)
    door.send(kind="begun", seconds=seconds)
    undo[0]()
    door.close()
    held.install()


def _enter(fd: int) -> None:
    door = None
    try:
        door = _Door(fd)
        _stand_by(door)
    except BaseException as error:  # noqa: BLE001 - else the script would run, as if all were well
        reason = f"{type(error).__name__}: {error}"
        if door is not None:
            door.send(kind="failed", reason=reason[:2000])
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
