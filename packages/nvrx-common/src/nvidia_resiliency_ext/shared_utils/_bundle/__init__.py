# SPDX-License-Identifier: Apache-2.0
"""Private room of ``nvrx-report bundle``: what a bug report needs, without secrets."""
