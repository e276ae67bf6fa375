# SPDX-License-Identifier: Apache-2.0
"""`tools/check_docs.py` on small pages: which blocks it runs, and how they can fail."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from browser import Browser, find_browser
from fault_jobs import MARK, marked, wait_until

from nvidia_resiliency_ext.fault_tolerance import cli_args
from nvidia_resiliency_ext.fault_tolerance._agent import many_nodes
from nvidia_resiliency_ext.fault_tolerance._config.table import OPTIONS
from nvidia_resiliency_ext.fault_tolerance._control import plan as control

OURS = "nvidia_resiliency_ext"
TOOL = Path(__file__).parents[1] / "tools" / "check_docs.py"


def run(root: Path, *args: str) -> tuple[int, str]:
    """Run the tool on the tree and return its exit code and output."""
    result = subprocess.run(
        [sys.executable, str(TOOL), "--root", str(root), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_a_block_marked_clone_finds_what_a_clone_has(tmp_path: Path) -> None:
    """The folder of such a block has the programs of the repository; other folders are empty."""
    block = "```sh test{mark}\ntest -f tests-integration/examples/pretrain.py\n```\n"
    (tmp_path / "README.md").write_text(block.format(mark=" clone"))
    assert run(tmp_path)[0] == 0
    (tmp_path / "README.md").write_text(block.format(mark=""))
    assert run(tmp_path)[0] == 1


def test_links_of_package_readmes_work_on_an_index(tmp_path: Path) -> None:
    """A relative link, and one into the repository that leads nowhere, are errors."""
    repository = "https://github.com/nvrx/nvrx/blob/main"
    page = tmp_path / "packages" / "one" / "README.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"[a]({repository}/packages/one/README.md#x) [b](https://example.org/b)\n")
    assert run(tmp_path)[0] == 0
    page.write_text(f"[a](../../docs/a.md) [b]({repository}/docs/b.md)\n")
    code, said = run(tmp_path)
    assert code == 1
    assert "packages/one/README.md: ../../docs/a.md is no whole address" in said
    assert f"{repository}/docs/b.md is not in the repository" in said


def test_marked_blocks_run_and_others_do_not(tmp_path: Path) -> None:
    """Blocks marked `python test` or `sh test` run, each in its own empty folder."""
    (tmp_path / "README.md").write_text(
        "```python\nraise SystemExit(1)\n```\n\n"
        "```python test\nopen('left', 'w').close()\n```\n\n"
        "- in a list\n\n  ```sh test\n  test ! -e left\n  python -c 'print(1)'\n  ```\n\n"
        "````text\n```sh test\nexit 1\n```\n````\n"
    )
    code, said = run(tmp_path)
    assert code == 0, said
    assert "README.md:6: ok" in said
    assert "2 of 2 code blocks work" in said


@pytest.mark.parametrize(
    ("language", "code", "reason"),
    [
        ("python", "print('words')\nraise ValueError('wrong')", "ValueError: wrong"),
        ("sh", "false\ntrue", "exit code 1"),
        ("sh", "echo $unset_variable", "exit code"),
    ],
)
def test_failing_block_is_named_with_its_line(
    tmp_path: Path, language: str, code: str, reason: str
) -> None:
    """A block that fails fails the check, which names page, line and the end of its output."""
    guides = tmp_path / "docs" / "guides"
    guides.mkdir(parents=True)
    (guides / "guide.md").write_text(f"# Guide\n\n```{language} test\n{code}\n```\n")
    status, said = run(tmp_path)
    assert status == 1
    assert "docs/guides/guide.md:4: exit code" in said
    assert reason in said


def test_block_that_does_not_end_is_stopped_with_its_children(tmp_path: Path) -> None:
    """At its deadline a block is ended, and so is what it started in the background."""
    mark = uuid.uuid4().hex
    (tmp_path / "README.md").write_text(
        f"```sh test\nexport {MARK}={mark}\nsleep 600 &\nsleep 600\n```\n"
    )
    code, said = run(tmp_path, "--deadline", "1")
    assert code == 1
    assert "did not end within 1 s" in said
    wait_until(lambda: not marked(MARK, mark), "the end of what was killed")


def test_unknown_language_is_an_error(tmp_path: Path) -> None:
    """A block in a language that the tool cannot run is reported, not skipped."""
    (tmp_path / "README.md").write_text("```ruby test\nputs 1\n```\n")
    code, said = run(tmp_path)
    assert code == 1
    assert "README.md:1" in said


SOURCE = (
    TOOL.parents[1] / "packages" / "nvrx-ft" / "src" / "nvidia_resiliency_ext" / "fault_tolerance"
)


def named_modules(page: str) -> set[str]:
    """Return the modules that a page names; a bare name is of the folder before it, or of none."""
    named, folder, of_section = set(), "", ""
    for line in page.splitlines():
        if line.startswith("#"):
            found = re.search(r"`fault_tolerance/(\w+)/`", line)
            of_section = f"{found[1]}/" if found else ""
        folder = of_section
        for path in re.findall(r"`([\w/]+\.py)`", line):
            head, slash, name = path.rpartition("/")
            folder = head + slash if slash else folder
            named |= {name, folder + name} if not slash else {path}
    return named


def test_every_module_is_in_a_page_about_the_design() -> None:
    """Whoever looks for a module of nvrx-ft finds in docs/design what it is for."""
    pages = (TOOL.parents[1] / "docs" / "design").glob("nvrx-ft*.md")
    named = {path for page in pages for path in named_modules(page.read_text())}
    modules = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    missing = {path for path in modules if not path.endswith("__init__.py")} - named
    assert not missing


def test_options_that_may_differ_from_node_to_node_are_listed() -> None:
    """The guide names exactly the options that launchers of one job need not have alike."""
    guide = (TOOL.parents[1] / "docs" / "guides" / "many-nodes.md").read_text()
    listed = re.search(r"These may differ from node to node:(.*?)\n\n", guide, re.DOTALL)
    assert listed is not None
    flags = {f"--{one.flag}" for one in OPTIONS if one.field in many_nodes._OWN_AFFAIRS}
    assert set(re.findall(r"`(--[\w-]+)`", listed[1])) == flags


ROOT = TOOL.parents[1]
NAMED = re.compile(r"`([\w/-]*?)(?:\.py)?(\.\.\.)?(?:::(\w+))?`")
NAMES_A_TEST = re.compile(r"`([\w/-]*\btest_\w+\.py|\.\.\.::)")


def missing_tests(page: str) -> list[str]:
    """Return the tests and benchmarks that a page names and nobody has.

    A name that begins with `test_` is a file or a function; one that ends with three dots is the
    beginning of a function's name in the file that was named before it, and `::` follows that file.
    """
    files: dict[str, str] = {}
    for path in [*ROOT.glob("tests-integration/test_*.py"), *ROOT.glob("packages/*/tests/**/*.py")]:
        files[path.stem] = files.get(path.stem, "") + path.read_text()
    functions = set(re.findall(r"def (test_\w+)", "".join(files.values())))
    missing, current = [], ""
    for line in page.splitlines():
        for name, dots, function in NAMED.findall(line):
            stem = name.rpartition("/")[2]
            if stem.startswith("test_") and stem in files:
                current = files[stem]
            if function and (not stem or stem.startswith("test_")):
                if (stem and stem not in files) or f"def {function}(" not in current:
                    missing.append(f"{name}::{function}")
            elif stem in files:
                continue
            elif stem.startswith("test_"):
                if not any(each == stem or (dots and each.startswith(stem)) for each in functions):
                    missing.append(name)
            elif dots and current and f"def test_{stem}" not in current:
                missing.append(name)
            elif name.startswith("bench/") and not any(ROOT.glob(f"*/{name}.py")):
                missing += [] if any(ROOT.glob(f"packages/*/{name}.py")) else [name]
    return missing


def test_tests_that_a_page_names_exist() -> None:
    """A page that says which test shows something names a test that is there."""
    pages = {str(page): page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    missing = {path: missing_tests(text) for path, text in pages.items() if "`test_" in text}
    assert missing
    assert not {path: names for path, names in missing.items() if names}


def test_a_test_that_does_not_exist_is_missed() -> None:
    """Files, whole names, beginnings of names and benchmarks are all looked up."""
    page = "`test_tools_docs`: `a_test_that...`, `nobody_wrote...`, `test_gone`, `bench/gone.py`"
    assert missing_tests(page) == ["nobody_wrote", "test_gone", "bench/gone"]
    page = (
        "`x/test_tools_docs.py::test_unknown_language_is_an_error`, `...::test_a`, `test_b.py::c`"
    )
    assert missing_tests(page) == ["::test_a", "test_b::c"]


def test_keys_of_the_rendezvous_are_listed() -> None:
    """The page lists each key of --rdzv-conf that the code reads, and none that it does not."""
    page = (ROOT / "docs" / "reference" / "rdzv-conf.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    listed = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    # What is left out reads keys of torch's own rendezvous.
    sources = [path for path in SOURCE.rglob("*.py") if path.stem != "c10d_monkey_patch"]
    code = "".join(path.read_text() for path in sources)
    reads = r"(?:rdzv_config_get_as_\w+|_seconds)\(\s*[\w.]+,|(?:conf|params)\.get(?:_as_\w+)?\("
    read = set(re.findall(rf'(?:{reads})\s*"(\w+)"', code))
    assert read - {"rank"} <= listed
    assert listed - set(re.findall(r'"(\w+)"', code)) <= {"close_timeout", "heartbeat_timeout"}


def test_default_times_of_the_rendezvous_are_listed() -> None:
    """The page says how long a launcher waits where nobody chose another time."""
    page = (ROOT / "docs" / "reference" / "rdzv-conf.md").read_text()
    for key, seconds in (
        ("join_timeout", many_nodes.JOIN_TIMEOUT_S),
        ("store_connect_wait_seconds", many_nodes.CONNECT_WAIT_S),
        ("last_call_timeout", many_nodes.LAST_CALL_S),
    ):
        assert re.search(rf"^\| `{key}` \| [^|]* \| {seconds:g}\b", page, re.MULTILINE), key


def numbers_of(cell: str) -> set[int]:
    """Return the numbers of the requirements in `CK-1`, `CK-1, CK-2` or `CK-1 to CK-3`."""
    found = [int(number) for number in re.findall(r"CK-(\d+)", cell)]
    return set(range(found[0], found[-1] + 1)) if " to " in cell and found else set(found)


def test_each_promise_about_checkpoints_names_its_test() -> None:
    """Each row of "what survives what", and each requirement CK-1 to CK-63, says what shows it."""
    numbers: set[int] = set()
    for name in ("guides/checkpoints-survive", "guides/checkpoints-local", "design/nvrx-ckpt*"):
        for page in (ROOT / "docs").glob(f"{name}.md"):
            shows = False
            for line in page.read_text().splitlines():
                if not line.startswith("|"):
                    shows = False
                elif line.rstrip().endswith("| test |"):
                    shows = True
                elif shows and not line.startswith("| ---"):
                    others = ("the same", "bench/", "by construction")
                    assert NAMES_A_TEST.search(line) or any(text in line for text in others), line
                    numbers |= numbers_of(line.split("|")[1])
    assert numbers == set(range(1, 64))


def test_blocks_that_do_not_run_here_are_well_formed() -> None:
    """Examples that need a cluster can be parsed, and take flags that the launchers have."""
    parsers = {"ft_launcher": cli_args.get_args_parser(), "nvrx-control": control.get_args_parser()}
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), ROOT / "README.md"]
    problems, commands = [], 0
    for page in pages:
        for language, text in re.findall(
            r"^```(sh|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            if language == "python":
                try:
                    ast.parse(text)
                except SyntaxError as error:
                    problems.append(f"{page}: {error}: {text}")
                continue
            checked = subprocess.run(
                ["sh", "-n"], input=text, capture_output=True, text=True, check=False
            )
            problems += [f"{page}: {checked.stderr}"] if checked.returncode else []
            for line in text.replace("\\\n", " ").splitlines():
                for program, rest in re.findall(r"\b(ft_launcher|nvrx-control) (.*)", line):
                    commands += 1
                    flags = re.findall(r"(?<!\S)(--[a-z][\w-]*)", re.sub(r"\S+\.py\b.*", "", rest))
                    known = parsers[program]._option_string_actions
                    problems += [f"{page}: {program} {flag}" for flag in flags if flag not in known]
    assert not problems
    assert commands > 10


def flags_of_programs() -> dict[str, set[str]]:
    """Return the flags that the reference lists for each program: it is made from the parsers."""
    page = (ROOT / "docs/reference/programs.md").read_text()
    found: dict[str, set[str]] = {}
    for title, text in re.findall(r"^## `(.*?)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        found[title] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) | {"--help", "--version"}
    found["nvrx-report"] |= found.pop("nvrx-report bundle") | {"--print-completion"}
    found[f"python -m {OURS}.attribution"] = found["nvrx-attribution"]
    return found


def wrong_flags(text: str, programs: dict[str, set[str]]) -> list[str]:
    """Return the flags in a shell program that its programs do not have, and programs not known."""
    problems: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r"[|;&>]", line):
            called = re.match(
                rf"\s*(?:exec )?(nvrx-[a-z-]+|python -m {OURS}[\w.]*)(?= |$)", command
            )
            if called is None or called[1] in ("nvrx-control", "nvrx-smonsvc"):
                continue
            if called[1] not in programs:
                problems.append(f"{called[1]} is no program of the reference")
                continue
            flags = re.findall(r"(?<!\S)(--[a-z][\w-]*)", command)
            problems += [f"{called[1]} {flag}" for flag in flags if flag not in programs[called[1]]]
    return problems


def test_flags_of_other_programs_in_examples_exist() -> None:
    """Shell examples take flags of nvrx-report and the others that the reference lists."""
    programs, problems = flags_of_programs(), []
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), ROOT / "README.md"]
    for page in [*pages, *ROOT.glob("packages/*/README.md")]:
        for text in re.findall(
            r"^```sh[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            problems += [f"{page}: {problem}" for problem in wrong_flags(text, programs)]
    assert not problems
    text = f"nvrx-report logs --htm x | cat\npython -m {OURS}.nowhere\nnvrx-report a --html b\n"
    assert wrong_flags(text, programs) == [
        "nvrx-report --htm",
        f"python -m {OURS}.nowhere is no program of the reference",
    ]


def resolve(name: str, module: str = "") -> object:
    """Return what a dotted name means, from a module if one is given."""
    found: object = importlib.import_module(module or name)
    for part in name.split(".") if module else ():
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(f"{module}.{part}")
    return found


def calls_of_missing_names(text: str) -> list[str]:
    """Return what a program takes from nvrx, or passes to it, that nvrx does not have."""
    known: dict[str, object] = {}
    problems: list[str] = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
                for each in node.names:
                    known[each.asname or each.name] = resolve(each.name, str(node.module))
            elif isinstance(node, ast.Import):
                for each in node.names:
                    if each.name.startswith(OURS):
                        known[each.asname or OURS] = resolve(each.name if each.asname else OURS)
        except ImportError as error:
            problems.append(str(error))
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        first, *rest = name.split(".")
        if first not in known or not all(part.isidentifier() for part in rest):
            continue
        called = known[first]
        for part in rest:
            called = getattr(called, part, None)
        if called is None:
            problems.append(f"{name} does not exist")
            continue
        parameters = inspect.signature(called).parameters  # type: ignore[arg-type]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        problems += [
            f"{name} takes no {keyword.arg}"
            for keyword in node.keywords
            if keyword.arg is not None and keyword.arg not in parameters and not takes_any
        ]
    return problems


def test_examples_that_do_not_run_here_call_what_there_is() -> None:
    """Each name that such an example takes from nvrx exists, and so does each argument's name."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), ROOT / "README.md"]
    pages += ROOT.glob("packages/*/README.md")
    problems, count = [], 0
    for page in pages:
        for text in re.findall(
            r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            count += 1
            problems += [f"{page}: {problem}" for problem in calls_of_missing_names(text)]
    assert not problems
    assert count > 10


def test_an_example_with_a_name_that_is_gone_is_found() -> None:
    """A module, a name, an attribute and an argument that do not exist are each named."""
    text = f"""
from {OURS}.fault_tolerance import Nothing
from {OURS}.nowhere import something
from {OURS}.shared_utils.events import EventLog
import {OURS}.shared_utils.rank_sets as rank_sets
rank_sets.no_function([1])
log = EventLog.join(source="train")
"""
    found = calls_of_missing_names(text)
    assert len(found) == 4
    assert "rank_sets.no_function does not exist" in found
    assert "EventLog.join takes no source" in found


CODE = """<link rel=stylesheet href="{static}/nvrx.css">
<p>Text.</p><div class="highlight"><pre><span class="gp">&gt;&gt;&gt; </span>one()
<span class="go">1</span></pre></div>
<div class="highlight"><pre>two</pre></div>
<script>navigator.clipboard.writeText = (text) => {{ window.copied = text; }}</script>
<script src="{static}/copy.js"></script>
"""


@pytest.mark.browser
def test_code_is_copied_without_prompts_and_output(tmp_path: Path) -> None:
    """Each block has a button, and what it copies is what the reader types."""
    program = find_browser()
    if program is None:
        pytest.skip("no browser is installed: tools/install_browser.sh does it")
    page = tmp_path / "page.html"
    page.write_text(CODE.format(static=(ROOT / "docs" / "_static").as_uri()))
    shown = Browser(program, tmp_path / "profile", page.as_uri())
    try:
        assert shown.run("document.querySelectorAll('.highlight > .copy').length") == 2
        shown.click(".copy")
        assert shown.run("window.copied").strip() == "one()"
        assert shown.run("document.querySelector('.copy').textContent") == "copied"
    finally:
        shown.close()
