# SPDX-License-Identifier: Apache-2.0
"""Private rooms of ``testing_utils.fake_hardware``: one stand-in each."""
