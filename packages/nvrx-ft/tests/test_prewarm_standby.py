# SPDX-License-Identifier: Apache-2.0
"""One standby process: from its start to the worker's end, and every way to fail before that."""

import dataclasses
import errno
import os
import select
import signal
import sys
import textwrap
import time
from pathlib import Path

import ft_conformance as conformance
import pytest
import standby_crew

from nvidia_resiliency_ext.fault_tolerance._workers import prewarmed as standbys
from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
from nvidia_resiliency_ext.fault_tolerance._workers.prewarmed import (
    Begun,
    Failed,
    PrewarmedWorker,
    PrewarmError,
    Ready,
)
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle

pytestmark = pytest.mark.slow


def script(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def command_of(path, *args):
    return WorkerCommand((sys.executable, str(path), *args), str(path), False, True)


@pytest.fixture
def held(tmp_path):
    """Start standbys that write into files and are ended with the test."""
    started = []
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def start(path, imports=(), *, wrapper=None, **changes):
        command = command_of(path)
        if wrapper is not None:
            command = dataclasses.replace(command, numa=[wrapper])
        standby = PrewarmedWorker(command, {**env, **changes}, 0, paths=("x", "x"), imports=imports)
        started.append(standby)
        return standby

    yield start
    for standby in started:
        standby.end()


def run_to_end(standby, tmp_path, **env):
    """Tell a standby to go; return (status, stdout, stderr)."""
    paths = [tmp_path / "stdout", tmp_path / "stderr"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fds = [os.open(path, flags, 0o644) for path in paths]
    try:
        standby.go({**standby.env, **env}, (None, *fds))
    finally:
        for fd in fds:
            os.close(fd)
    event = conformance.receive(standby)
    while isinstance(event, Ready):
        event = conformance.receive(standby)
    assert isinstance(event, Begun), event
    standby.release()
    status = standby.child.wait(60.0)
    return status.describe(), *(path.read_text() for path in paths)


def test_runs_the_script_only_after_go(tmp_path, held):
    """The script is read and run after "go", with the environment that "go" carries."""
    path = script(tmp_path, "raise SystemExit('too early')")
    standby = held(path, ("numpy",))
    assert isinstance(conformance.receive(standby), Ready)
    script(tmp_path, "import os; print(os.environ['RANK'], os.environ.get('PYTHONPATH'))")
    assert run_to_end(standby, tmp_path, RANK="5") == ("exit code 0", "5 None\n", "")


def test_is_told_apart_in_process_lists_until_go(tmp_path, held):
    """The name of the process says "(standby)" before "go" and is the usual one after."""
    standby = held(script(tmp_path, "print(open('/proc/self/comm').read().strip())"))
    conformance.receive(standby)
    assert procfs.read_stat(standby.child.pid).comm.endswith("(standby)")
    _, stdout, _ = run_to_end(standby, tmp_path)
    assert stdout.strip() == os.path.basename(os.path.realpath(sys.executable))[:15] or (
        stdout.strip() == os.path.basename(sys.executable)[:15]
    )


def test_go_during_imports_skips_the_rest(tmp_path, held):
    """A standby told to go while it imports leaves out what it has not begun to import."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    slow = script(tmp_path, f"open({str(pipe)!r}).read()", "slow_module.py")
    script(tmp_path, "raise RuntimeError('imported all the same')", "never_module.py")
    path = script(tmp_path, "import sys; print('slow_module' in sys.modules, 'ran')")
    standby = held(path, ("slow_module", "never_module"), PYTHONPATH=str(slow.parent))
    with pipe.open("w"):
        standby.go(standby.env)
    assert isinstance(conformance.receive(standby), Begun)
    out = os.dup(standby._outputs[0])
    standby.release()
    assert standby.child.wait(60.0).describe() == "exit code 0"
    text = os.pread(out, 100, 0)
    os.close(out)
    assert text == b"False ran\n"


def test_failing_import_does_not_run_the_script(tmp_path, held):
    """A module that cannot be imported ends the standby with its reason, and nothing else."""
    ran = tmp_path / "ran"
    path = script(tmp_path, f"open({str(ran)!r}, 'w')")
    standby = held(path, ("there_is_no_such_module",))
    event = conformance.receive(standby)
    assert isinstance(event, Failed)
    assert "No module named 'there_is_no_such_module'" in event.reason
    assert standby.child.wait(60.0).code == 70
    assert not ran.exists()


@pytest.mark.parametrize("how", ["sys.exit(0)", "raise KeyboardInterrupt", "raise MemoryError"])
def test_import_that_wants_to_exit_fails(tmp_path, held, how):
    """Even `sys.exit(0)` in an import does not run the script and is no success."""
    script(tmp_path, f"import sys\n{how}", "leaving.py")
    standby = held(script(tmp_path, "print('ran')"), ("leaving",), PYTHONPATH=str(tmp_path))
    assert isinstance(conformance.receive(standby), Failed)


def test_failure_after_go_is_reported(tmp_path, held):
    """A standby that was told to go and then cannot be used says so: start the worker cold."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script(tmp_path, f"open({str(pipe)!r}).read(); raise OSError('broken')", "breaking.py")
    standby = held(script(tmp_path, "print('ran')"), ("breaking",), PYTHONPATH=str(tmp_path))
    # Opening the pipe waits until the import has begun, closing it lets the import fail.
    with pipe.open("w"):
        standby.go(standby.env)
    event = conformance.receive(standby)
    assert isinstance(event, Failed)
    assert "broken" in event.reason


def test_killed_standby_is_reported(tmp_path, held):
    """A standby that dies is reported with how it died."""
    standby = held(script(tmp_path, ""))
    conformance.receive(standby)
    os.kill(standby.child.pid, signal.SIGKILL)
    event = conformance.receive(standby)
    assert event == Failed("it ended (killed by SIGKILL (9)) before it was ready") or (
        "socket" in event.reason
    )
    with pytest.raises(PrewarmError):
        standby.go(standby.env)


def test_leaves_silently_when_the_launcher_is_gone(tmp_path, held):
    """At the end of its socket a standby exits with status 0 and writes nothing."""
    standby = held(script(tmp_path, "print('ran')"))
    conformance.receive(standby)
    outputs = [os.dup(fd) for fd in standby._outputs]
    standby.release()
    child = standby.child
    assert child.wait(60.0).describe() == "exit code 0"
    written = [os.fstat(fd).st_size for fd in outputs]
    for fd in outputs:
        os.close(fd)
    assert written == [0, 0]


def test_dies_with_the_launcher(tmp_path):
    """A standby does not outlive a launcher that is killed, even while it imports."""
    script(tmp_path, "import time; time.sleep(60)", "sleeping.py")
    path = script(tmp_path, "")
    launcher = script(
        tmp_path,
        f"""
        import os, signal, sys
        from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
        from nvidia_resiliency_ext.fault_tolerance._workers.prewarmed import PrewarmedWorker
        command = WorkerCommand((sys.executable, {str(path)!r}), {str(path)!r}, False, True)
        env = {{"PATH": os.environ["PATH"], "PYTHONPATH": {str(tmp_path)!r}}}
        standby = PrewarmedWorker(command, env, 0, imports=("sleeping",))
        print(standby.child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "launcher.py",
    )
    reader, writer = os.pipe()
    child = standbys.start_child((sys.executable, str(launcher)), stdout=writer)
    os.close(writer)
    with child, os.fdopen(reader) as output:
        pid = int(output.readline())
        # The pipe ends when the last process that has it, the standby, has gone.
        assert select.select([output], [], [], 20.0)[0]
        assert output.read() == ""
    try:
        with PidHandle(pid) as handle:
            assert handle.wait(60.0)
    except ProcessLookupError:
        pass


def test_wrapper_that_forks_is_refused(tmp_path, held):
    """A wrapper that runs Python as its own child is noticed: that child could not be watched."""
    path = script(tmp_path, "print('ran')")
    wrapper = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
    event = conformance.receive(held(path, wrapper=wrapper))
    assert isinstance(event, Failed)
    assert "child of another process" in event.reason


def test_wrapper_that_execs_is_fine(tmp_path, held):
    """A wrapper that becomes Python, as numactl does, changes nothing."""
    path = script(tmp_path, "print('ran')")
    standby = held(path, wrapper=("/usr/bin/env", "WRAPPED=1"))
    assert isinstance(conformance.receive(standby), Ready)
    assert run_to_end(standby, tmp_path)[:2] == ("exit code 0", "ran\n")


PROBLEMS = {
    "chdir": ("import os; os.chdir('/')", "the working directory"),
    "umask": ("import os; os.umask(0o77)", "the umask"),
    "signal": ("import signal; signal.signal(signal.SIGUSR1, print)", "signal handlers"),
    "hook": ("import sys; sys.excepthook = print", "an exception hook"),
    "limit": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
        "a resource limit",
    ),
    "thread": (
        "import threading, time as t; threading.Thread(None, t.sleep, args=(9,), daemon=1).start()",
        "started a thread",
    ),
    "child": ("import subprocess; p = subprocess.Popen(['sleep', '9'])", "started a process"),
    "start method": (
        "import multiprocessing; multiprocessing.set_start_method('spawn')",
        "start method",
    ),
    "locale": ("import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "the locale"),
    "path": ("import sys; sys.path.append('/somewhere')", "sys.path"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_import_that_does_more_is_a_problem(tmp_path, held, name):
    """A module that changes the process while it is imported keeps the standby from being used."""
    text, expected = PROBLEMS[name]
    script(tmp_path, text, "doing_more.py")
    standby = held(script(tmp_path, ""), ("doing_more",), PYTHONPATH=str(tmp_path))
    ready = conformance.receive(standby)
    assert isinstance(ready, Ready)
    assert expected in ready.problem
    os.killpg(standby.child.pid, signal.SIGKILL)


def test_shadowed_module_is_a_problem(tmp_path, held):
    """A file beside the script that takes a module's place for the script is noticed."""
    shadow = script(tmp_path, "", "numbers.py")
    ready = conformance.receive(held(script(tmp_path, ""), ("numpy",)))
    assert ready.problem.startswith(f"{shadow} stands before the module numbers")


def test_folders_of_the_same_name_are_no_problem(tmp_path, held):
    """A folder without `__init__.py` beside the script takes no module's place."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "tempfile.txt").touch()
    ready = conformance.receive(held(script(tmp_path, ""), ("numpy.version",)))
    assert ready.problem is None


def test_package_beside_the_script_is_imported_ahead(tmp_path, held):
    """A package that only the script's folder has can be named, and is executed once."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("print('executed')")
    path = script(tmp_path, "import sys; print('mine' in sys.modules); import mine")
    standby = held(path, ("mine",))
    ready = conformance.receive(standby)
    assert ready.problem is None
    # Printed during the import, so it is the launcher's and not the script's.
    assert run_to_end(standby, tmp_path) == ("exit code 0", "False\n", "")


def test_module_that_seeds_on_import_has_its_way(tmp_path, held):
    """Random state that an import sets is what the script gets, as in a fresh worker."""
    script(tmp_path, "import random, numpy; random.seed(3); numpy.random.seed(3)", "seeding.py")
    path = script(
        tmp_path,
        "import seeding, random, numpy; print(random.random(), numpy.random.random())",
    )
    env = {"PYTHONPATH": str(tmp_path)}
    standby = held(path, ("seeding",), **env)
    assert isinstance(conformance.receive(standby), Ready)
    _, warm, _ = run_to_end(standby, tmp_path)
    import random

    assert warm.split()[0] == str(random.Random(3).random())
    assert warm.split()[1] == str(pytest.importorskip("numpy").random.RandomState(3).random())


def test_variable_set_before_the_import_gives_one_warning(tmp_path, held):
    """A script that sets an import-time variable first is told that it has no effect."""
    path = script(
        tmp_path,
        """
        import os
        vars()["os"].environ["OPENBLAS_NUM_THREADS"] = "3"
        os.environ["RANK"] = "7"
        import numpy
        import numpy.linalg
        """,
    )
    standby = held(path, ("numpy",))
    conformance.receive(standby)
    _, _, stderr = run_to_end(standby, tmp_path)
    assert stderr.count("WARNING") == 1
    assert "OPENBLAS_NUM_THREADS" in stderr
    assert "--ft-prewarm off" in stderr
    assert "RANK" not in stderr


def test_search_path_changed_before_the_import_gives_a_warning(tmp_path, held):
    """A script that puts another copy of a module in front is told that it comes too late."""
    other = tmp_path / "other"
    (other / "numpy").mkdir(parents=True)
    (other / "numpy" / "__init__.py").touch()
    path = script(tmp_path, f"import sys; sys.path.insert(1, {str(other)!r}); import numpy")
    standby = held(path, ("numpy",))
    conformance.receive(standby)
    _, _, stderr = run_to_end(standby, tmp_path)
    assert "sys.path came too late" in stderr


def test_the_hosts_sitecustomize_still_runs(tmp_path, held):
    """The host's own `sitecustomize` is run after "go", with the worker's environment."""
    script(
        tmp_path,
        "import os, sys\nprint('host', os.environ.get('RANK'), file=sys.stderr)",
        "sitecustomize.py",
    )
    path = script(tmp_path, "import sitecustomize; print(sitecustomize.__file__)")
    standby = held(path, PYTHONPATH=str(tmp_path))
    assert isinstance(conformance.receive(standby), Ready)
    status, stdout, stderr = run_to_end(standby, tmp_path, RANK="2")
    assert (status, stderr) == ("exit code 0", "host 2\n")
    assert stdout == f"{tmp_path / 'sitecustomize.py'}\n"


def test_output_of_imports_goes_to_the_log(tmp_path, held, caplog):
    """What an import prints is logged once and does not get into the worker's output."""
    script(tmp_path, "print('printed while importing')", "printing.py")
    standby = held(script(tmp_path, ""), ("printing",), PYTHONPATH=str(tmp_path))
    with caplog.at_level("INFO", "nvrx"):
        conformance.receive(standby)
        assert run_to_end(standby, tmp_path) == ("exit code 0", "", "")
    assert sum("printed while importing" in line for line in caplog.messages) == 1


def test_changed_package_makes_it_stale(tmp_path, held):
    """A standby knows when a package that it imported has changed on disk."""
    module = script(tmp_path, "value = 1", "changing.py")
    standby = held(script(tmp_path, ""), ("changing",), PYTHONPATH=str(tmp_path))
    conformance.receive(standby)
    assert standby.stale_file() is None
    module.write_text("value = 23")
    assert standby.stale_file() == str(module)


def test_order_that_cannot_be_sent_is_an_error(tmp_path, held):
    """An environment too large for one message is refused at once and does not block."""
    standby = held(script(tmp_path, ""))
    with pytest.raises(PrewarmError, match="too large"):
        standby.go({**standby.env, "LARGE": "x" * (1 << 20)})


@pytest.mark.parametrize("streams", [("x", None), (os.devnull, "x")])
def test_without_files_in_memory_it_cannot_be_started(tmp_path, held, monkeypatch, streams):
    """A kernel that refuses memfds makes the worker start cold, and no descriptor stays open."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PrewarmError, match=r"cannot be prepared: .*not implemented"):
        PrewarmedWorker(command_of(script(tmp_path, "")), {}, 0, paths=streams, imports=())
    assert os.listdir("/proc/self/fd") == before


def test_our_sockets_are_not_inherited(tmp_path, held):
    """A worker that is started later does not hold the sockets of standbys."""
    standby = held(script(tmp_path, ""))
    assert not os.get_inheritable(standby.fileno())


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.no_second_try
def test_training_from_standby_equals_a_cold_one(tmp_path):
    """Two ranks from standby end with the weights of two fresh ranks, and seeds of their own."""
    pytest.importorskip("torch")
    _, cold = standby_crew.train_cold(tmp_path / "cold", 2)
    crew, _ = standby_crew.hold(tmp_path / "warm", 2)
    pids = {standby.child.pid for standby in crew}
    go_at, warm = standby_crew.train_warm(tmp_path / "warm", crew)
    assert [rank["weights"] for rank in warm] == [rank["weights"] for rank in cold]
    assert not any(rank["loaded_before"] for rank in warm)
    assert all(rank["same_object"] for rank in warm)
    assert len({rank["seed"] for rank in warm + cold}) == 4
    assert {rank["pid"] for rank in warm} == pids
    assert max(rank["first_step_at"] for rank in warm) - go_at < 30.0


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_torch_features_behave_the_same(socket_folder):
    """Loaders with processes, spawned processes and pickles work the same from standby."""
    pytest.importorskip("torch")
    setting = conformance.Setting(socket_folder, imports=standbys.DEFAULT_IMPORTS)
    assert conformance.case_difference(setting, "torch") is None


def test_time_is_not_spent_on_waiting(tmp_path, held):
    """From "go" to the script's first line takes a small part of a fresh start."""
    path = script(tmp_path, "import time; print(time.monotonic())")
    deadline = time.monotonic() + 30
    took_s = 30.0
    # One that waits does so each time; one that the machine lets stand still does not.
    while took_s >= 0.5:
        assert time.monotonic() < deadline, took_s
        standby = held(path, ("numpy",))
        conformance.receive(standby)
        at = time.monotonic()
        _, stdout, _ = run_to_end(standby, tmp_path)
        took_s = float(stdout) - at


def test_programs_exist():
    """The programs that these tests run are where the helpers look for them."""
    assert Path(conformance.PROBE).is_file()
    assert Path(standby_crew.TRAINING).is_file()
