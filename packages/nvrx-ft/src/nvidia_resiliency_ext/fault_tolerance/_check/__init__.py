# SPDX-License-Identifier: Apache-2.0
"""`ft_launcher --check` and `--print-config`: what would be done, and whether it can be."""
