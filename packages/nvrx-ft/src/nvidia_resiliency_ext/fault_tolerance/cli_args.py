# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, under the path that programs import it from."""

from ._launch.parser import get_args_parser, parse_args

__all__ = ["get_args_parser", "parse_args"]
