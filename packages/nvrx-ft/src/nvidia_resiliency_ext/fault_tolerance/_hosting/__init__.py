# SPDX-License-Identifier: Apache-2.0
"""What the host of a job runs, be it a launcher or `nvrx-control`.

`thread` serves the store and decides the rounds; `services` owns log servers, cycle information and
attribution.
"""
