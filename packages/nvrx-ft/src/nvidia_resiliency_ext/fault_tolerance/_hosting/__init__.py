# SPDX-License-Identifier: Apache-2.0
"""What the host of a job runs, be it a launcher or `nvrx-control`.

`plan` says what was asked for; `services` owns log servers, cycle information and attribution;
`thread` serves the store and decides the rounds; `nodes` and `log_token` are what they tell others.
"""
