# SPDX-License-Identifier: Apache-2.0
"""The command line of `ft_launcher`: flags, parser, plan, `--check` and `--print-config`."""
