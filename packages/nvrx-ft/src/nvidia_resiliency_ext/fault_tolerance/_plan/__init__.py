# SPDX-License-Identifier: Apache-2.0
"""What a launch is: a `LaunchPlan` from command line, environment and options."""
