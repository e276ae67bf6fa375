# SPDX-License-Identifier: Apache-2.0
"""Reading the `fault_tolerance` section of a YAML file; what its values mean is decided elsewhere.

The rest of the file is somebody else's: it is parsed into nodes, never built, so that foreign tags
and repeated keys do no harm. Aliases are not expanded, so that a small file cannot grow in memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._core import errors

SECTION = "fault_tolerance"
SIZE_LIMIT_BYTES = 1 << 20
PIPE_LIMIT_S = 10.0
_DEEPEST_BRACKETS = 64
_MERGE_TAG = "tag:yaml.org,2002:merge"


def read_section(path: str) -> list[tuple[str, Any, str]]:
    """Return key, value and place in words of each entry of a file's `fault_tolerance` mapping.

    It is the first one, depth first; values are scalars, or lists or mappings of them. Raises
    FileNotFoundError, SectionMissingError where there is no such mapping or it is empty,
    FaultToleranceConfigError for an unreadable file.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, token_class: Any) -> None:
            # Each bracket may begin a key, and all open ones are looked at for each token.
            if self.flow_level >= _DEEPEST_BRACKETS:
                raise RecursionError
            super().fetch_flow_collection_start(token_class)

    text = _read_text(path)
    loader = None
    try:
        loader = Loader(text)
        entries = _Reader(loader, path).entries(_find(loader.get_single_node(), path))
    except yaml.YAMLError as error:
        raise errors.FaultToleranceConfigError([_explain(error, path)]) from None
    except RecursionError:
        raise _error(path, "is nested too deeply to be read") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not entries:
        raise errors.SectionMissingError([f"{path}: section {SECTION} is empty; give it an option"])
    return entries


def _error(path: str, problem: str, node: Any = None) -> errors.FaultToleranceConfigError:
    where = path if node is None else f"{path} line {_line(node)}"
    return errors.FaultToleranceConfigError([f"{where}: {problem}"])


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _explain(error: Exception, path: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path} line {mark.line + 1}" if mark is not None else path
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    remedy = "; indent with spaces" if "\\t" in problem else ""
    return f"{where}: is not YAML: {problem}{remedy}"


def _read_text(path: str) -> str:
    try:
        data = _read_bytes(path)
    except (FileNotFoundError, errors.FaultToleranceConfigError):
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(path, f"cannot be read: {reason}") from None
    if len(data) > SIZE_LIMIT_BYTES:
        raise _error(path, f"is larger than {SIZE_LIMIT_BYTES >> 20} MiB; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _error(path, f"is no UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _read_bytes(path: str) -> bytes:
    """Return at most one byte more than the limit; wait for nobody but an open pipe of ours."""
    from nvidia_resiliency_ext.shared_utils.abandonable import DeadlineCaller, StuckError
    from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return read_regular_file(path, SIZE_LIMIT_BYTES + 1, follows_symlink=True)
    real = os.path.realpath(path)
    # What /dev/stdin and a shell's <(...) stand for; an empty file; and what `open` refuses.
    is_ours = stat.S_ISFIFO(mode) and real.startswith("/proc/")
    if not (is_ours or real == os.devnull or stat.S_ISDIR(mode)):
        raise _error(path, "is not a regular file")

    def read() -> bytes:
        with open(path, "rb") as stream:
            return stream.read(SIZE_LIMIT_BYTES + 1)

    try:
        data: bytes = DeadlineCaller().run(path, read, PIPE_LIMIT_S)
    except StuckError:
        raise _error(path, f"is a pipe without an end: waited {PIPE_LIMIT_S:g} s") from None
    return data


def _find(root: Any, path: str) -> Any:
    """Return the node of the first section that is a mapping."""
    stray = None
    for node in _mappings(root):
        sections = [value for key, value in node.value if key.value == SECTION]
        if len(sections) > 1:
            raise _error(path, f"{SECTION} stands there twice; keep one", sections[1])
        for value in sections:
            if value.id == "mapping":
                return value
            stray = stray or value
    if stray is not None and stray.value:
        raise _error(path, f"{SECTION} is no mapping; write keys and values below it", stray)
    if stray is not None:
        raise errors.SectionMissingError([f"{path}: section {SECTION} is empty; give it an option"])
    keys = [key for node in _mappings(root) for key, _ in node.value if key.id == "scalar"]
    names = {key.value[: 2 * len(SECTION)]: _line(key) for key in reversed(keys)}
    hint = f"; write '{SECTION}:' and indent the options below it"
    for name in errors.similar(SECTION, names):
        hint = f"; is it {name!r} in line {names[name]} that should be called so?"
    raise errors.SectionMissingError([f"{path}: section {SECTION} is missing{hint}"])


def _mappings(root: Any) -> Iterator[Any]:
    """Yield every mapping of a document once, depth first."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "mapping":
            yield node
            waiting.extend(value for _, value in reversed(node.value))
        elif node.id == "sequence":
            waiting.extend(reversed(node.value))


class _Reader:
    """Builds the values of one section."""

    def __init__(self, loader: Any, path: str) -> None:
        self._loader = loader
        self._path = path
        self._pairs_of: dict[int, dict[str, tuple[Any, Any]]] = {}

    def entries(self, section: Any) -> list[tuple[str, Any, str]]:
        return [
            (name, self._value(name, value), f"{self._path} line {_line(key)}: ")
            for name, (key, value) in self._pairs(section).items()
        ]

    def _pairs(self, mapping: Any) -> dict[str, tuple[Any, Any]]:
        """Return the pairs by name, merged ones (`<<`) overridden by the mapping's own."""
        read_before = self._pairs_of.get(id(mapping))
        if read_before is not None:
            return read_before
        # Set early: a mapping that merges itself sees what it has so far, and comes to an end.
        merged = self._pairs_of[id(mapping)] = {}
        own: dict[str, tuple[Any, Any]] = {}
        for key, value in mapping.value:
            if key.tag == _MERGE_TAG:
                # The first of several merged mappings wins, as YAML has it.
                for source in value.value if value.id == "sequence" else [value]:
                    if source.id != "mapping":
                        raise _error(self._path, "<< takes a mapping", source)
                    merged.update({k: p for k, p in self._pairs(source).items() if k not in merged})
                continue
            if key.id != "scalar":
                raise _error(self._path, "a key is no plain word", key)
            if key.value in own:
                raise _error(self._path, f"key {key.value!r} stands there twice; keep one", key)
            own[key.value] = (key, value)
        merged.update(own)
        return merged

    def _value(self, name: str, node: Any) -> Any:
        if node.id == "sequence":
            return [self._scalar(name, item) for item in node.value]
        if node.id == "mapping":
            return {
                key: self._scalar(f"{name}.{key}", item)
                for key, (_, item) in self._pairs(node).items()
            }
        return self._scalar(name, node)

    def _scalar(self, name: str, node: Any) -> Any:
        if node.id != "scalar":
            raise _error(self._path, f"{name} is nested too deeply", node)
        try:
            return self._loader.construct_object(node)
        except ValueError:
            # For example an integer of ten thousand digits or the 31st of February.
            raise _error(self._path, f"{name} is no value that can be read", node) from None
