# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, under the path that programs import it from."""

from nvidia_resiliency_ext.fault_tolerance._cli.parser import get_args_parser, parse_args

__all__ = ["get_args_parser", "parse_args"]
