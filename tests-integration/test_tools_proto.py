# SPDX-License-Identifier: Apache-2.0
"""The generator of protobuf modules, as far as it goes without its compiler."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools" / "gen_proto.py"
FOLDER = ROOT / "packages/nvrx-common/src/nvidia_resiliency_ext/shared_utils/proto"


def test_another_compiler_is_refused() -> None:
    """Without the pinned compiler nothing is generated or judged, and one line says what to run."""
    try:
        importlib.metadata.version("grpcio-tools")
        pytest.skip("the compiler is installed here; `dev.py check` compares the files with it")
    except importlib.metadata.PackageNotFoundError:
        pass
    result = subprocess.run(
        [sys.executable, str(TOOL), "--check"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 2
    assert (
        result.stderr == "gen_proto: needs grpcio-tools 1.62.3; run: python3 tools/dev.py proto\n"
    )


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.proto")), ids=lambda path: path.name)
def test_checked_in_modules_are_of_the_pinned_compiler(source: Path) -> None:
    """Each definition has its modules, of the version that makes no demands at run time."""
    made = source.with_name(f"{source.stem}_pb2.py").read_text()
    assert re.search(r"^# Protobuf Python Version: 4\.25\.1$", made, re.MULTILINE)
    assert source.with_name(f"{source.stem}_pb2.pyi").exists()
    assert "_version" not in source.with_name(f"{source.stem}_pb2_grpc.py").read_text()
