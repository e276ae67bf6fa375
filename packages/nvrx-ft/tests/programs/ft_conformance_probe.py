# SPDX-License-Identifier: Apache-2.0
"""Says what a program can see of the process it runs in; run cold and from standby, and compared.

`state OUT [MODULES]` writes facts as JSON: before any third-party import, and after importing the
comma-separated modules. Every other first argument is a way to end, to print or to start others.
"""

import atexit
import fcntl
import gc
import importlib.util
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings

GLIBC_SIGNALS = 1 << 31 | 1 << 32


def file_facts(fd):
    """Return kind and flags of a descriptor."""
    kind = os.fstat(fd)
    return [
        stat.S_IFMT(kind.st_mode),
        kind.st_blksize,
        os.isatty(fd),
        fcntl.fcntl(fd, fcntl.F_GETFD),
        fcntl.fcntl(fd, fcntl.F_GETFL),
    ]


def stream_facts(stream):
    """Return what a text stream says of itself."""
    names = ("encoding", "errors", "newlines", "line_buffering", "write_through", "mode", "name")
    raw = stream.buffer.raw
    return {
        **{name: getattr(stream, name) for name in names},
        "type": [type(stream).__name__, type(stream.buffer).__name__, type(raw).__name__],
        "fd": stream.fileno(),
        "tty": stream.isatty(),
        "seekable": stream.seekable(),
        "block": raw._blksize,
        "closefd": raw.closefd,
    }


def kernel_environment():
    """Return the environment as a child and as the C library see it."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    child = subprocess.run(["/usr/bin/env", "-0"], stdout=subprocess.PIPE, check=True).stdout
    names = [*os.environ, "NVRX_STANDBY_FD", "NVRX_STANDBY_PYTHONPATH", "PYTHONPATH"]
    return {
        "child": sorted(child.decode().split("\0")),
        "libc": {name: str(libc.getenv(name.encode())) for name in names},
    }


def prctl_facts():
    """Return what prctl tells of this process."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    death = ctypes.c_int()
    prctl(2, ctypes.byref(death), 0, 0, 0)
    return {"death": death.value, "dumpable": prctl(3), "no_new_privs": prctl(39, 0, 0, 0, 0)}


def status_facts():
    """Return lines of /proc/self/status that do not depend on memory or chance."""
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    facts = {name: lines[name] for name in ("Name", "Umask", "Uid", "Gid", "NoNewPrivs")}
    for name in ("SigBlk", "SigIgn", "SigCgt"):
        facts[name] = int(lines[name], 16) & ~GLIBC_SIGNALS
    return facts


def sys_facts():
    """Return what `sys` says."""
    names = (
        "argv", "orig_argv", "executable", "path", "prefix", "exec_prefix", "base_prefix",
        "warnoptions", "dont_write_bytecode", "pycache_prefix", "platlibdir", "float_repr_style",
        "byteorder", "maxsize", "version",
    )  # fmt: skip
    calls = (
        "getrecursionlimit", "getswitchinterval", "getdlopenflags", "getfilesystemencoding",
        "getfilesystemencodeerrors", "getdefaultencoding", "gettrace", "getprofile",
        "get_asyncgen_hooks", "is_finalizing", "get_int_max_str_digits",
        "get_coroutine_origin_tracking_depth",
    )  # fmt: skip
    return {
        **{name: getattr(sys, name) for name in names},
        **{name: repr(getattr(sys, name, lambda: None)()) for name in calls},
        "flags": repr(sys.flags),
        "xoptions": sys._xoptions,
        "meta_path": finders(),
        "path_hooks": [hook.__name__ for hook in sys.path_hooks],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.breakpointhook is sys.__breakpointhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            threading.excepthook is threading.__excepthook__,
        ],
        "same_streams": [
            sys.stdin is sys.__stdin__,
            sys.stdout is sys.__stdout__,
            sys.stderr is sys.__stderr__,
        ],
        "last": [hasattr(sys, name) for name in ("last_type", "last_exc", "ps1", "tracebacklimit")],
        "hash": hash("a text"),
        "frames": len(sys._current_frames()),
        "depth": frame_depth(),
    }


def finders():
    """Return the finders but for the one that gives back modules that were imported ahead."""
    found = [finder for finder in sys.meta_path if type(finder).__module__ != "sitecustomize"]
    return [getattr(finder, "__name__", type(finder).__name__) for finder in found]


def frame_depth():
    """Return the number of frames up to the bottom."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def main_facts():
    """Return what the module `__main__` has."""
    main = sys.modules["__main__"]
    spec = main.__spec__
    return {
        "names": sorted(vars(main)),
        "file": main.__file__,
        "package": main.__package__,
        "cached": main.__cached__,
        "doc": main.__doc__[:20],
        "loader": type(main.__loader__).__name__,
        "spec": None if spec is None else [spec.name, spec.origin],
        "sitecustomize": "sitecustomize" in sys.modules,
    }


def process_facts():
    """Return what the kernel knows of this process."""
    fds = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            fds.append([int(name), *file_facts(int(name))])
        except OSError:
            continue  # The descriptor of the listing itself.
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "cwd": os.getcwd(),
        "fds": fds,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": [
            os.sched_getscheduler(int(task)) for task in sorted(os.listdir("/proc/self/task"))
        ],
        "affinity": sorted(os.sched_getaffinity(0)),
        "comms": [
            open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")
        ],
        "leader": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
        "cmdline": open("/proc/self/cmdline").read(),
        "oom": open("/proc/self/oom_score_adj").read(),
        "exe": os.readlink("/proc/self/exe"),
        **status_facts(),
        **prctl_facts(),
    }


def python_facts():
    """Return state of the standard library."""
    return {
        "signals": {n: repr(signal.getsignal(n)) for n in range(1, 65)},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "gc": [
            gc.get_freeze_count(),
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            len(gc.callbacks),
        ],
        "locale": [locale.setlocale(getattr(locale, n)) for n in dir(locale) if n[:3] == "LC_"],
        "time": [time.tzname, time.timezone, time.localtime(0).tm_hour],
        "tempdir": [tempfile.tempdir, tempfile.gettempdir()],
        "filters": [repr(entry) for entry in warnings.filters],
        "threads": [thread.name for thread in threading.enumerate()],
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "multiprocessing": [
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.current_process().name,
            len(multiprocessing.active_children()),
        ],
        "random": random.random(),
        "secret": secrets.token_hex(4),
        "uuid": str(uuid.uuid4()),
        "name": next(tempfile._get_candidate_names()),
    }


def third_party_facts(names):
    """Return what can be said of modules without importing them."""
    library = sys.stdlib_module_names
    found = {}
    # To find a submodule its package is imported.
    for name in (name for name in names if "." not in name):
        spec = importlib.util.find_spec(name)
        parts = spec and spec.submodule_search_locations
        found[name] = spec and [spec.name, spec.origin, spec.cached, parts and list(parts)]
    # What torch makes up, what the first step adds, a file of the standard library, and what comes
    # with numpy.random, as both were imported by torch._dynamo.
    aside = (
        "_remote_module_non_scriptable",
        "torch.profiler._cupti_monitor",
        "_sysconfigdata",
        "numpy.fft",
    )
    others = (name for name in sys.modules if name.partition(".")[0] not in library)
    loaded = sorted(name for name in others if not name.startswith(aside))
    return {"loaded": loaded, "specs": found}


def imported_facts(names):
    """Import modules and return what they are and how they behave."""
    facts = {"streams_before": [sys.stdout is sys.__stdout__]}
    for name in names:
        __import__(name)
        module = sys.modules[name]
        spec = module.__spec__
        facts[name] = [
            module.__file__, module.__name__, module.__package__,
            spec.name, spec.origin, type(spec.loader).__name__, type(module.__loader__).__name__,
            spec.parent, bool(getattr(spec, "_initializing", False)),
        ]  # fmt: skip
    if "numpy" in sys.modules:
        import numpy as np

        facts["numpy_state"] = {
            "draw": np.random.random(),  # noqa: NPY002 - the shared generator is the point
            "sum": float(np.arange(10.0).reshape(2, 5).dot(np.ones(5)).sum()),
            "errors": np.geterr(),
            "print": {k: repr(v) for k, v in np.get_printoptions().items()},
        }
    if "torch" in sys.modules:
        facts["torch_state"] = torch_facts()
    facts["third_party"] = third_party_facts(())
    facts["filters"] = [repr(entry) for entry in warnings.filters]
    # torch._dynamo sets it at import; a worker from standby when it is first needed.
    facts["environ"] = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    facts["meta_path"] = finders()
    return facts


def torch_facts():
    """Return torch's settings, draws and some results."""
    import torch
    import torch.distributed

    torch.set_deterministic_debug_mode(0)
    facts = {
        "seed": torch.initial_seed(),
        "draw": torch.rand(1).item(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "cuda": [torch.cuda.is_available(), torch.cuda.is_initialized()],
        "distributed": torch.distributed.is_initialized(),
        "parallel": torch.__config__.parallel_info(),
        "start": torch.multiprocessing.get_start_method(allow_none=True),
    }
    weights = torch.arange(12.0).reshape(3, 4).requires_grad_()
    (weights @ weights.T).sum().backward()
    facts["backward"] = weights.grad.tolist()
    torch.manual_seed(7)
    facts["seeded"] = torch.rand(3).tolist()
    facts["lazy"] = sorted(name for name in ("_dynamo", "_inductor", "onnx") if name in vars(torch))
    facts["nn"] = hasattr(torch.distributed, "nn")
    return facts


def lazy_facts():
    """Return what is seen once the modules are loaded that torch loads when they are needed."""
    import torch._dynamo
    import torch._inductor.config

    third = third_party_facts(())["loaded"]
    return {
        "loaded": third,
        "compile_threads": torch._inductor.config.compile_threads,
        "filters": [repr(entry) for entry in warnings.filters],
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
    }


def write_state(out, modules):
    """Write all facts to a file."""
    names = [name for name in modules.split(",") if name]
    before = {
        "third_party": third_party_facts(names),
        "sys": sys_facts(),
        "main": main_facts(),
        "streams": {n: stream_facts(getattr(sys, n)) for n in ("stdin", "stdout", "stderr")},
        "environ": dict(os.environ),
        "process": process_facts(),
        "python": python_facts(),
        "kernel_environment": kernel_environment(),
    }
    facts = {"before": before, "after": imported_facts(names) if names else {}}
    if "torch" in sys.modules:
        facts["lazy"] = lazy_facts()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(facts, file, default=repr)


def fail():
    """Raise from some depth."""
    raise ValueError("a message")


def raise_chained():
    """Raise an error with cause and context."""
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("second") from error


def raise_group():
    """Raise several errors at once where Python knows that."""
    if sys.version_info >= (3, 11):
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])  # noqa: F821
    raise ValueError("one")


def at_exit():
    """Register handlers that print."""
    atexit.register(print, "first registered")
    atexit.register(print, "last registered")


def thread_at_exit(*, daemon):
    """Leave a thread running at exit."""
    started = threading.Event()

    def run():
        started.set()
        time.sleep(0.1 if not daemon else 60)
        print("thread ends")

    threading.Thread(target=run, daemon=daemon).start()
    started.wait()
    print("main ends")


def double(number):
    """Be a task of a pool."""
    return number * 2


def pool(method):
    """Map in a pool of processes and say what a child's modules and environment are."""
    with multiprocessing.get_context(method).Pool(2) as workers:
        print(sum(workers.map(double, range(10))))
        print(workers.apply(child_view))


def child_view():
    """Say what a child process sees of the hook."""
    left = sorted(name for name in os.environ if name.startswith(("NVRX_STANDBY", "PYTHONPATH")))
    third = sorted(n for n in ("numpy", "torch", "sitecustomize") if n in sys.modules)
    return left, third, [entry for entry in sys.path if "hook" in entry]


def run_subprocess():
    """Run another Python."""
    code = "import sys, os; print(sys.path, 'sitecustomize' in sys.modules, sorted(os.environ))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(done.stdout, done.stderr)


def fork():
    """Fork and exit both ways."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        print("child", child_view())
        sys.stdout.flush()
        os._exit(3)
    print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def exec_self():
    """Replace this process by another run of this program."""
    print("before exec", flush=True)
    os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "unflushed"])


def missing():
    """Import what is not there."""
    __import__("there_is_no_such_module")


def recurse():
    """Call itself until Python objects."""
    recurse()


def configure_logging():
    """Disable the loggers that exist, then import a module and look at what it logs."""
    from logging.config import dictConfig

    dictConfig({"version": 1, "root": {"level": "WARNING"}})
    for name in sys.argv[2:]:
        __import__(name)
    loggers = logging.root.manager.loggerDict.items()
    loaded = [(k, v) for k, v in loggers if k in sys.modules and isinstance(v, logging.Logger)]
    print(sorted(k for k, v in loaded if v.disabled))


def reimport():
    """Reload a module and import it again after it was removed."""
    import numpy as np

    first = np
    if importlib.reload(sys.modules["numpy.version"]) is not sys.modules["numpy.version"]:
        print("reload made another module")
    print(first is sys.modules["numpy"], np.__spec__.loader.__class__.__name__)


def warn():
    """Issue warnings of several kinds."""
    warnings.warn("shown", UserWarning, stacklevel=1)
    warnings.warn("not shown", ImportWarning, stacklevel=1)
    warnings.warn("shown in main", DeprecationWarning, stacklevel=1)


def data_loader(method):
    """Load batches with worker processes."""
    import torch

    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=1, multiprocessing_context=method
    )
    print([batch[0].tolist() for batch in loader])


def spawned(index, text):
    """Be a process of torch.multiprocessing."""
    print(index, text, child_view(), flush=True)


def torch_spawn():
    """Start a process by torch.multiprocessing."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(spawned, args=("said",), nprocs=1)


def pickle_tensors():
    """Pickle tensors and classes there and back."""
    import pickle

    import torch

    module = pickle.loads(pickle.dumps(torch.nn.Linear(2, 2)))
    print(type(module) is torch.nn.Linear, module.weight.shape)


def torch_features():
    """Load batches in every way, pickle and start a process; the fork comes before any output."""
    data_loader("fork")
    pickle_tensors()
    data_loader("forkserver")
    data_loader("spawn")
    torch_spawn()


def compile_function():
    """Compile a function with inductor."""
    import torch

    print(torch.compile(lambda x: (x * 2 + 1).sum())(torch.arange(4.0)).item())


def set_title():
    """Change the process's title."""
    import setproctitle

    setproctitle.setproctitle("another title")
    with open("/proc/self/cmdline", encoding="utf-8") as file:
        print(setproctitle.getproctitle(), file.read().rstrip("\0"))


CASES = {
    "exit-0": lambda: sys.exit(0),
    "exit-3": lambda: sys.exit(3),
    "exit-none": sys.exit,
    "exit-text": lambda: sys.exit("a reason"),
    "exit-300": lambda: sys.exit(300),
    "exit-true": lambda: sys.exit(True),
    "uncaught": fail,
    "chained": raise_chained,
    "group": raise_group,
    "missing-module": missing,
    "recursion": recurse,
    "os-exit": lambda: (print("lost"), os._exit(7)),
    "abort": os.abort,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigint": lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(5)),
    "sigpipe": lambda: os.kill(os.getpid(), signal.SIGPIPE),
    "atexit": at_exit,
    "daemon-thread": lambda: thread_at_exit(daemon=True),
    "thread": lambda: thread_at_exit(daemon=False),
    "unflushed": lambda: (sys.stdout.write("out without end"), sys.stderr.write("err")),
    "read": lambda: print(repr(sys.stdin.read())),
    "fork": fork,
    "pool-fork": lambda: pool("fork"),
    "pool-spawn": lambda: pool("spawn"),
    "pool-forkserver": lambda: pool("forkserver"),
    "subprocess": run_subprocess,
    "execv": exec_self,
    "logging": configure_logging,
    "reimport": reimport,
    "warnings": warn,
    "title": set_title,
    "torch": torch_features,
    "compile": compile_function,
}


def main():
    """Do what the first argument names."""
    if sys.argv[1] == "state":
        write_state(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
    else:
        CASES[sys.argv[1]]()


if __name__ == "__main__":
    main()
