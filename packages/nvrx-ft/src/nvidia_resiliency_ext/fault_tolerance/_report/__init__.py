# SPDX-License-Identifier: Apache-2.0
"""What a launcher writes about a job: events, failure records, files about cycles."""
