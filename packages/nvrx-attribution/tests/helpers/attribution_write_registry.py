# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - texts of logs, and patterns for them, stay on one line
"""Write the bundled registry as JSON, from its TOML files: `python attribution_write_registry.py`."""

import json
from pathlib import Path

import tomllib

FOLDER = Path(__file__).parents[2] / "src" / "nvidia_resiliency_ext" / "attribution" / "registry"


def bundled() -> str:
    """Return the JSON text of the TOML files."""
    codes = tomllib.loads((FOLDER / "codes.toml").read_text())
    rules = tomllib.loads((FOLDER / "rules.toml").read_text())
    shared = rules.pop("shared")
    for rule in rules["rule"]:
        if "unless" in rule:
            rule["unless"] = [shared[u[1:]] if u.startswith("@") else u for u in rule["unless"]]
    return json.dumps({**codes, **rules}, indent=1) + "\n"


if __name__ == "__main__":
    (FOLDER / "bundled.json").write_text(bundled())
