# SPDX-License-Identifier: Apache-2.0
"""The rooms behind `per_cycle_logs`: workers' output, one file for each cycle.

    worker -> pipe -> reader thread -> lines -> backlog -> writer thread -> file or log server

`lines`, `names` and `backlog` decide; `pipes`, `spill`, `sinks` and `servers` own one resource
each; `reader` and `outlet` own a thread each; `collector` puts them together.
"""
