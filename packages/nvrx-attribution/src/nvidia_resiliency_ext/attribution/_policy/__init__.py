# SPDX-License-Identifier: Apache-2.0
"""From what was found to what is done: fusion with traces, history of the job, budgets."""
