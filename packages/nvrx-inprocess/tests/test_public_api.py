# SPDX-License-Identifier: Apache-2.0
"""The public names of nvrx-inprocess are those that this package has recorded."""

from pathlib import Path

import api_record

test_record_is_current = api_record.check_of("nvrx-inprocess")
test_module_has_what_it_exports = api_record.import_of(Path(__file__).with_name("public_api.txt"))
