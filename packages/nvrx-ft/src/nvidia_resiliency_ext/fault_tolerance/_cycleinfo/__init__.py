# SPDX-License-Identifier: Apache-2.0
"""The rooms behind `cycle_info_writer`: one small file about each cycle, for other programs.

`record` is what the file says; `writer` owns the files and a thread; `reporter` knows the job.
"""
