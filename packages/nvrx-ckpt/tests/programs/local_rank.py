# SPDX-License-Identifier: Apache-2.0
"""A rank that runs what a test asks for over the socket that is its input.

Arguments: its number, how many there are, and the port of their store.
"""

import os
import sys
from multiprocessing.connection import Connection

import local_ranks

connection = Connection(os.dup(0))
local_ranks.serve(*map(int, sys.argv[1:]), connection)
