# SPDX-License-Identifier: Apache-2.0
"""The options of fault tolerance: one table, and the dataclass, file and flags made from it.

`table.py` lists the options; `values.py` turns text into values; `settings.py` holds the dataclass;
`yaml_file.py` reads one section of a file; `sources.py` merges file and flags.
The command line itself is `cli_args.py`.
"""
